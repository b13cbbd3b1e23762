"""Advantage estimators by name: each declares what it pays, what it reads, and returns one number per sampled token.

A user adds one from an agent or pipeline file; no file of this package changes:

    @estimator("best_of", unit="rollout")
    def best_of(inputs: EstimatorInputs) -> Tensor:
        return inputs.spread((inputs.reward_U == inputs.reward_U.max()).double())

Estimators see the whole batch, never a micro-batch or a rank's share, so their result cannot depend on the cut.
They compute in float64 and are rounded to float32 once, at the end. Rules that hold for all of them:
    a rollout without reward (NaN) enters no statistic and gets exactly 0, unless the estimator reads no reward
    a group of one scored rollout, and a group of equal rewards, get exactly 0 from every group baseline
    an infinite reward is refused: NonFiniteError
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from molt.algo.batch import RaggedBatch, total
from molt.algo.inputs import EstimatorInputs
from molt.errors import NonFiniteError, SettingError

if TYPE_CHECKING:
    from molt.config import AlgoSettings

Unit = Literal["rollout", "segment"]
Need = Literal["logprobs", "values", "teacher_logprobs"]
EstimatorFunction = Callable[[EstimatorInputs], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """What is known of one estimator."""

    name: str
    unit: Unit
    """What is paid and counted once: a rollout however many segments it has, or each segment by itself."""
    needs: frozenset[Need]
    """Token columns that must be there, each from a forward pass before the update."""
    uses_reward: bool
    """Whether rollouts without reward are left out."""
    whiten: bool
    """Whitening when algo.advantage.whiten is absent."""
    uses: frozenset[str]
    """Names of algo.advantage settings, besides whiten, that change its result; others must stay at their default."""
    function: EstimatorFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Result of one estimator on one batch."""

    advantages_T: Tensor
    """float32: 0 at tokens that may not reach the gradient."""
    returns_T: Tensor | None
    """float32: targets of the critic; None without one."""
    metrics: dict[str, float]


_ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    name: str,
    *,
    unit: Unit = "rollout",
    needs: frozenset[Need] | set[Need] = frozenset(),
    uses_reward: bool = True,
    whiten: bool = False,
    uses: frozenset[str] | set[str] = frozenset(),
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Register a function under a name. SettingError when another function holds it already."""

    def register(function: EstimatorFunction) -> EstimatorFunction:
        held = _ESTIMATORS.get(name)
        if held is not None and _origin(held.function) != _origin(function):
            raise SettingError(f"algo.advantage.estimator={name} is registered already by {_origin(held.function)}; choose another name")
        _ESTIMATORS[name] = Estimator(
            name=name, unit=unit, needs=frozenset(needs), uses_reward=uses_reward, whiten=whiten, uses=frozenset(uses), function=function
        )
        return function

    return register


def _origin(function: EstimatorFunction) -> str:
    # A file loaded twice (driver, then worker) registers the same estimator again; that is no conflict.
    return f"{function.__code__.co_filename}:{function.__qualname__}"


def estimator_names() -> list[str]:
    """Names of all registered estimators, sorted."""
    return sorted(_ESTIMATORS)


def get_estimator(name: str) -> Estimator:
    """The estimator of a name, or SettingError that lists the names."""
    if name not in _ESTIMATORS:
        raise SettingError(
            f"algo.advantage.estimator={name} is unknown; known are {', '.join(estimator_names())}; "
            "register another with @molt.algo.advantage.estimator in the agent file"
        )
    return _ESTIMATORS[name]


def compute_advantages(
    name: str,
    batch: RaggedBatch,
    settings: AlgoSettings,
    *,
    kl_T: Tensor | None = None,
    values_T: Tensor | None = None,
    logprobs_T: Tensor | None = None,
    teacher_logprobs_T: Tensor | None = None,
) -> Advantages:
    """Advantages of the whole batch.

    settings is config.algo. kl_T is the divergence from the reference per token (molt.algo.kl.kl_estimate), read only
    under algo.kl.use=reward; logprobs_T are the trainer's at step start. All float32, nats.
    """
    chosen = get_estimator(name)
    columns: dict[Need, Tensor | None] = {"logprobs": logprobs_T, "values": values_T, "teacher_logprobs": teacher_logprobs_T}
    for need in sorted(chosen.needs):
        if columns[need] is None:
            raise SettingError(f"algo.advantage.estimator={name} needs {need} of every sampled token, got none; score the batch first")
    if bool(torch.isinf(batch.reward_R).any()):
        place = int(torch.isinf(batch.reward_R).nonzero()[0])
        value = float(batch.reward_R[place])
        raise NonFiniteError(f"reward of rollout {place} of the batch is {value}; the agent must return a finite number")
    inputs = EstimatorInputs.of(
        batch,
        settings,
        unit=chosen.unit,
        uses_reward=chosen.uses_reward,
        kl_T=kl_T,
        values_T=values_T,
        logprobs_T=logprobs_T,
        teacher_logprobs_T=teacher_logprobs_T,
    )
    result = chosen.function(inputs)
    advantages_T, returns_T = result if isinstance(result, tuple) else (result, None)
    if advantages_T.shape != inputs.unit_T.shape:
        raise SettingError(
            f"algo.advantage.estimator={name} returned shape {tuple(advantages_T.shape)}, not one number for each of "
            f"{len(inputs.unit_T)} sampled tokens; end it with inputs.spread(...)"
        )
    if settings.advantage.whiten if settings.advantage.whiten is not None else chosen.whiten:
        advantages_T = whiten(advantages_T, inputs.is_counted_T)
    advantages_T = torch.where(inputs.is_counted_T, advantages_T, 0.0).float()
    _refuse_non_finite(name, advantages_T)
    return Advantages(
        advantages_T=advantages_T,
        returns_T=None if returns_T is None else returns_T.float(),
        metrics=_metrics(batch, inputs, advantages_T),
    )


def whiten(values_T: Tensor, is_counted_T: Tensor) -> Tensor:
    """(A - mean) / sqrt(max(var, 1e-8)) over counted tokens, population variance (REINFORCE++, arXiv 2501.03262).

    Equal values give exactly 0.
    """
    counted = values_T[is_counted_T]
    if len(counted) == 0 or bool(counted.max() == counted.min()):
        return torch.zeros_like(values_T)
    mean = total(counted) / len(counted)
    variance = total((counted - mean).square()) / len(counted)
    return (values_T - mean) / math.sqrt(max(variance, 1e-8))


def _refuse_non_finite(name: str, advantages_T: Tensor) -> None:
    finite_T = torch.isfinite(advantages_T)
    if not bool(finite_T.all()):
        place = int((~finite_T).nonzero()[0])
        raise NonFiniteError(f"advantage of sampled token {place} of the batch is {float(advantages_T[place])} under estimator {name}")


def _metrics(batch: RaggedBatch, inputs: EstimatorInputs, advantages_T: Tensor) -> dict[str, float]:
    counted = advantages_T[inputs.is_counted_T].double()
    scored = batch.reward_R[batch.is_scored_R].double()
    return {
        "num_rollouts": float(batch.num_rollouts),
        "num_unscored_rollouts": float((~batch.is_scored_R).sum()),
        "num_groups": float(batch.num_groups),
        "num_constant_groups": float(inputs.num_constant_groups),
        "reward_mean": float(scored.mean()) if len(scored) else float("nan"),
        "advantage_mean": float(counted.mean()) if len(counted) else 0.0,
        "advantage_std": float(counted.std(unbiased=False)) if len(counted) else 0.0,
        "advantage_abs_max": float(counted.abs().max()) if len(counted) else 0.0,
        "n_zero_advantage": float((counted == 0).sum()),
    }


@estimator("reinforce", whiten=True, uses={"gamma"})
def reinforce(inputs: EstimatorInputs) -> Tensor:
    """REINFORCE++: discounted return, divergence as reward, whitened over the batch (arXiv 2501.03262)."""
    return inputs.returns(inputs.reward_U)


@estimator("reinforce_baseline", whiten=True, uses={"gamma"})
def reinforce_baseline(inputs: EstimatorInputs) -> Tensor:
    """REINFORCE++ with the group mean as baseline, then whitened over the batch (arXiv 2501.03262)."""
    return inputs.returns(inputs.centred_by_group())


@estimator("rloo")
def rloo(inputs: EstimatorInputs) -> Tensor:
    """Reward minus the mean of the other scored members: n/(n-1) times the centred reward (arXiv 2402.14740)."""
    n_U = inputs.scored_in_group_U.double()
    return inputs.returns(inputs.centred_by_group() * n_U / (n_U - 1).clamp(min=1))


@estimator("grpo")
def grpo(inputs: EstimatorInputs) -> Tensor:
    """Centred reward over the sample deviation of the group plus 1e-6 (arXiv 2402.03300)."""
    return inputs.returns(inputs.centred_by_group() / (inputs.std_of_group_U() + 1e-6))


@estimator("dr_grpo")
def dr_grpo(inputs: EstimatorInputs) -> Tensor:
    """Centred reward, undivided (arXiv 2503.20783)."""
    return inputs.returns(inputs.centred_by_group())
