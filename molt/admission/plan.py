"""The plan of one step: which segment goes to which rank and micro-batch, fixed before anyone trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """The scalars of one segment that planning and advantages need. Token columns stay in the log."""

    segment_id: str
    rollout_id: str
    group_id: str
    prompt_index: int
    lsn: int
    n_tokens: int
    n_sampled: int
    version_min: int | None
    version_max: int | None
    reward: float | None
    outcome: float | None
    is_truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that a rank needs to train one step, and replay needs to train it again."""

    step: int
    policy_version: int
    seed: int
    segments: tuple[SegmentRow, ...]
    """The whole batch in batch order (group, rollout, segment): advantages are computed over all of it on every rank."""
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch] -> places in segments. Every rank has the same number; an empty one is a dummy of weight 0."""
    n_sampled: int
    """Sampled tokens of the whole batch: the token-mean denominator, fixed before rejection."""
    num_rollouts: int
    num_groups: int
    cursor: int
    """Largest lsn of segments taken in."""
