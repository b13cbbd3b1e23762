"""Reward shaping and dynamic filtering: from the agent's reward to the one that an estimator sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molt.algo.batch import RaggedBatch, mean_by

if TYPE_CHECKING:
    from molt.config import AlgoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedBatch:
    """The batch under shaped rewards; the agent's own stay in the log."""

    batch: RaggedBatch
    metrics: dict[str, float]
    """Counts of rollouts: num_clipped, num_stopped_improperly, num_overlong."""


def shape_rewards(batch: RaggedBatch, settings: AlgoSettings, *, max_len: int) -> ShapedBatch:
    """Reward after, in this order: clip to the range, factor on truncated rollouts, overlong penalty.

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
        shaped_R = torch.where(batch.is_truncated_R, shaped_R * reward.stop_properly_penalty, shaped_R)
        metrics["num_stopped_improperly"] = float(batch.is_truncated_R.sum())
    if reward.overlong_buffer > 0:
        over_R = (batch.longest_R.double() - (max_len - reward.overlong_buffer)) / reward.overlong_buffer
        shaped_R = shaped_R - reward.overlong_penalty * over_R.clamp(0.0, 1.0)
        metrics["num_overlong"] = float((over_R > 0).sum())
    return ShapedBatch(batch=batch.with_reward(shaped_R.float()), metrics=metrics)


def keep_groups(batch: RaggedBatch, settings: AlgoSettings) -> Tensor:
    """Dynamic filtering: groups whose mean outcome lies strictly inside algo.reward.filter_range. bool. # (G,)

    It looks at the outcome, not at the reward, so that a shaped reward cannot make an all-fail group look mixed; at the
    reward where the agent gave no outcome. A group without any score is not kept. All are kept when the range is absent.
    """
    if settings.reward.filter_range is None:
        return torch.ones(batch.num_groups, dtype=torch.bool)
    low, high = settings.reward.filter_range
    score_R = torch.where(torch.isnan(batch.outcome_R), batch.reward_R, batch.outcome_R)
    is_known_R = ~torch.isnan(score_R)
    mean_G = mean_by(score_R, batch.group_R, batch.num_groups, is_known_R)
    has_score_G = torch.bincount(batch.group_R[is_known_R], minlength=batch.num_groups) > 0
    return has_score_G & (mean_G > low) & (mean_G < high)
