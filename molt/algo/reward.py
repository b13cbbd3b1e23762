"""Reward shaping: from the agent's reward to the one that an estimator sees. Filtering looks at outcomes, in molt.admission.decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from molt.algo.batch import RaggedBatch

if TYPE_CHECKING:
    from molt.config import AlgoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedBatch:
    """The batch under shaped rewards; the agent's own stay in the log."""

    batch: RaggedBatch
    metrics: dict[str, float]
    """Counts of rollouts: num_clipped, num_stopped_improperly, num_overlong; and of groups: num_groups_of_one_outcome, whose rollouts
    shaping alone tells apart, which an estimator that divides by the deviation makes as large as right and wrong."""


def shape_rewards(batch: RaggedBatch, settings: AlgoSettings, *, max_len: int) -> ShapedBatch:
    """Reward after, in this order: clip to the range, factor on truncated rollouts, overlong penalty.

    The factor is on a reward above 0: a negative one would come nearer to 0 by it, and being cut would pay.

    Overlong (DAPO, arXiv 2503.14476, 3.4): with n tokens in the rollout's longest segment, L = max_len and B the buffer, subtract
    penalty * clip((n - (L - B)) / B, 0, 1). An unscored rollout (NaN) stays unscored. max_len is data.max_len.
    """
    reward = settings.reward
    shaped_R = batch.reward_R.double()
    metrics = {"num_clipped": 0.0, "num_stopped_improperly": 0.0, "num_overlong": 0.0}
    if reward.clip is not None:
        clipped_R = shaped_R.clamp(*reward.clip)
        metrics["num_clipped"] = float((batch.is_scored_R & (clipped_R != shaped_R)).sum())
        shaped_R = clipped_R
    if reward.stop_properly_penalty is not None:
        shaped_R = torch.where(batch.is_truncated_R & (shaped_R > 0), shaped_R * reward.stop_properly_penalty, shaped_R)
        metrics["num_stopped_improperly"] = float(batch.is_truncated_R.sum())
    if reward.overlong_buffer > 0:
        over_R = (batch.longest_R.double() - (max_len - reward.overlong_buffer)) / reward.overlong_buffer
        shaped_R = shaped_R - reward.overlong_penalty * over_R.clamp(0.0, 1.0)
        metrics["num_overlong"] = float((over_R > 0).sum())
    shaped = batch.with_reward(shaped_R.float())
    outcome_R = torch.where(torch.isnan(batch.outcome_R), batch.reward_R, batch.outcome_R)
    is_told_apart_G = _is_mixed(batch, shaped.reward_R) & ~_is_mixed(batch, outcome_R)
    return ShapedBatch(batch=shaped, metrics=metrics | {"num_groups_of_one_outcome": float(is_told_apart_G.sum())})


def _is_mixed(batch: RaggedBatch, values_R: torch.Tensor) -> torch.Tensor:
    """Groups whose scored rollouts differ in a value. # (G,)"""
    group_K, values_K = batch.group_R[batch.is_scored_R], values_R[batch.is_scored_R]
    high_G = torch.full((batch.num_groups,), -torch.inf).scatter_reduce_(0, group_K, values_K, "amax")
    low_G = torch.full((batch.num_groups,), torch.inf).scatter_reduce_(0, group_K, values_K, "amin")
    return low_G < high_G
