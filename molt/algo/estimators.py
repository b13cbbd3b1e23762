"""Advantage estimators by name: each declares what it pays, what it reads, and returns one number per sampled token.

A user adds one from an agent or pipeline file; no file of this package changes:

    @estimator("best_of", unit="rollout")
    def best_of(inputs: EstimatorInputs) -> Tensor:
        best = inputs.reward_U.where(inputs.is_scored_U, float("-inf")).max()
        return inputs.spread((inputs.reward_U == best).double())

It sees the whole batch in float64 (molt.algo.inputs), never a micro-batch or a rank's share, and ends in inputs.spread or
inputs.returns. A critic's estimator returns (advantages_T, returns_T).
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from molt.algo.batch import total
from molt.algo.inputs import EstimatorInputs
from molt.errors import SettingError

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


def estimator_file(name: str) -> str | None:
    """The file outside this package that registered an estimator, for other processes to load; None for a built-in one."""
    path = get_estimator(name).function.__code__.co_filename
    return None if path == __file__ else path


def load_estimators(path: str) -> None:
    """Run an agent or pipeline file for what it registers, unless its estimators are known already."""
    if any(chosen.function.__code__.co_filename == path for chosen in _ESTIMATORS.values()):
        return
    if not Path(path).is_file():
        raise SettingError(f"algo.advantage.estimator is registered in {path}, which is not there; give the file to every host")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # modules beside the file can be imported, as from an agent file
    runpy.run_path(path)


def get_estimator(name: str) -> Estimator:
    """The estimator of a name, or SettingError that lists the names."""
    if name not in _ESTIMATORS:
        raise SettingError(
            f"algo.advantage.estimator={name} is unknown; known are {', '.join(estimator_names())}; "
            "register another with @molt.algo.advantage.estimator in the agent file or in a pipeline (--pipeline FILE)"
        )
    return _ESTIMATORS[name]


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


@estimator("gae", needs={"values"}, whiten=True, uses={"gamma", "lambd"})
def gae(inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage with a critic (arXiv 1506.02438): delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lambda A_t+1.

    The value after the last token of a rollout is 0, also for a truncated one. Returns are A + V before whitening.
    """
    assert inputs.values_T is not None, "needs has been checked"
    gamma, lambd = inputs.settings.advantage.gamma, inputs.settings.advantage.lambd
    delta_T = inputs.final_rewards_T() + gamma * inputs.next_T(inputs.values_T) - inputs.values_T
    advantages_T = inputs.suffix_sum(delta_T, gamma * lambd)
    return advantages_T, advantages_T + inputs.values_T


@estimator("on_policy_distill", needs={"logprobs", "teacher_logprobs"}, uses_reward=False)
def on_policy_distill(inputs: EstimatorInputs) -> Tensor:
    """Minus the reverse divergence to the teacher at each token: log p_teacher - log p_policy, undiscounted (arXiv 2306.13649).

    It reads no reward, so rollouts that could not be scored train as well.
    """
    assert inputs.logprobs_T is not None and inputs.teacher_logprobs_T is not None, "needs has been checked"
    return inputs.teacher_logprobs_T - inputs.logprobs_T


@estimator("flash_reinforce")
def flash_reinforce(inputs: EstimatorInputs) -> Tensor:
    """Reward minus the mean over the scored rollouts of the batch: a baseline that needs one rollout per prompt."""
    scored = inputs.reward_U[inputs.is_scored_U]
    if len(scored) == 0 or bool(scored.max() == scored.min()):
        return inputs.returns(torch.zeros_like(inputs.reward_U))
    return inputs.returns(torch.where(inputs.is_scored_U, inputs.reward_U - total(scored) / len(scored), 0.0))
