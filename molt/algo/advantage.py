"""Advantages of one whole batch by the name of an estimator, checked, whitened where asked, and measured.

Rules that hold for every estimator:
    results are computed in float64 over the whole batch and rounded to float32 once, so no cut of a batch changes them
    a rollout without reward (NaN) enters no statistic and gets exactly 0, unless the estimator reads no reward
    a group of one scored rollout, and a group of equal rewards, get exactly 0 from every group baseline; whitening, where it is on
    (reinforce_baseline), then moves them with the rest of the batch
    a token that may not train gets exactly 0 and is transparent in time; a batch without trainable tokens gets all 0
    an infinite reward, and any advantage that is not finite, is refused: NonFiniteError
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molt.algo.batch import RaggedBatch, total
from molt.algo.estimators import Estimator, Need, estimator, estimator_names, get_estimator
from molt.algo.inputs import EstimatorInputs
from molt.algo.rules import check_estimator
from molt.errors import NonFiniteError, SettingError

if TYPE_CHECKING:
    from molt.config import AlgoSettings

__all__ = ["Advantages", "Estimator", "compute_advantages", "estimator", "estimator_names", "get_estimator", "whiten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Result of one estimator on one batch."""

    advantages_T: Tensor
    """float32: 0 at tokens that may not reach the gradient."""
    returns_T: Tensor | None
    """float32: targets of the critic, where is_counted_T is true; None without one."""
    is_counted_T: Tensor
    """bool: tokens that may reach the gradient and whose rollout counts."""
    metrics: dict[str, float]


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
    check_estimator(settings, name=name, uses=chosen.uses, needs=chosen.needs)
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
        is_counted_T=inputs.is_counted_T,
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
