"""What becomes of a finished group: admitted, stale, filtered, incomplete or failed, with the reason in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from molt.admission.plan import SegmentRow


class Decision(StrEnum):
    """What admission decided on a group."""

    ADMITTED = "admitted"
    """It trains at the next step that has room."""
    STALE = "stale"
    """Its oldest token is older than the bound."""
    FILTERED = "filtered"
    """Its outcomes teach nothing: the mean lies outside the filter range."""
    INCOMPLETE = "incomplete"
    """Members failed for good, and incomplete groups are dropped."""
    FAILED = "failed"
    """No member finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """The decision on one group and the figures that it rests on."""

    group_id: str
    decision: Decision
    reason: str
    lag: int | None
    num_rollouts: int
    num_failed: int
    n_sampled: int
    reward_mean: float | None
    reward_std: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The settings that a decision looks at."""

    max_lag: int
    group_size: int
    drop_incomplete: bool
    filter_range: tuple[float, float] | None


def decide_group(group_id: str, segments: list[SegmentRow], *, num_failed: int, policy_version: int, rule: AdmissionRule) -> GroupVerdict:
    """Decide on one finished group at a policy version.

    segments: every segment of every finished rollout of the group. Rewards count once for each rollout, however many segments it has.
    """
    rollouts = {row.rollout_id: row for row in segments}
    rewards = [row.reward for row in rollouts.values() if row.reward is not None]
    versions = [row.version_min for row in segments if row.version_min is not None]
    lag = policy_version - min(versions) if versions else None
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)) if mean is not None else None
    decision, reason = _judge(rollouts, num_failed, lag, rule)
    return GroupVerdict(
        group_id=group_id,
        decision=decision,
        reason=reason,
        lag=lag,
        num_rollouts=len(rollouts),
        num_failed=num_failed,
        n_sampled=sum(row.n_sampled for row in segments),
        reward_mean=mean,
        reward_std=std,
    )


def _judge(rollouts: dict[str, SegmentRow], num_failed: int, lag: int | None, rule: AdmissionRule) -> tuple[Decision, str]:
    if not rollouts:
        return Decision.FAILED, f"none of {rule.group_size} rollouts finished"
    if len(rollouts) < rule.group_size and rule.drop_incomplete:
        return Decision.INCOMPLETE, f"{len(rollouts)} of {rule.group_size} rollouts finished, {num_failed} failed"
    if lag is not None and lag > rule.max_lag:
        return Decision.STALE, f"lag {lag} is over max_lag={rule.max_lag}"
    if rule.filter_range is not None:
        outcomes = [row.reward if row.outcome is None else row.outcome for row in rollouts.values()]
        scored = [value for value in outcomes if value is not None]
        if not scored:
            return Decision.FILTERED, "no rollout could be scored"
        low, high = rule.filter_range
        mean = math.fsum(scored) / len(scored)
        if not low < mean < high:
            return Decision.FILTERED, f"mean outcome {mean:g} is not inside ({low:g}, {high:g})"
    return Decision.ADMITTED, f"lag {lag}" if lag is not None else "nothing sampled"
