"""What the pool, its workers and the driver hand to each other: tasks, outcomes and refit times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from molt.data.prompts import Prompt


class FailureReason(StrEnum):
    """Why a rollout failed. None of them is ever a reward."""

    AGENT_ERROR = "agent_error"
    AGENT_TIMEOUT = "agent_timeout"
    ENGINE_ERROR = "engine_error"
    LINEAGE_ERROR = "lineage_error"
    """Tokens without lineage would have reached the gradient."""
    PROMPT_TOO_LONG = "prompt_too_long"
    ATTEMPT_LOST = "attempt_lost"
    """The process that ran it is gone."""
    CANCELLED = "cancelled"
    """The run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """All rollouts of one prompt that are asked for now."""

    group_id: str
    epoch: int
    order_index: int
    prompt: Prompt
    group_size: int
    """Rollouts that make the group complete."""
    members: tuple[int, ...]
    """Members to run now: all of them at first, the missing ones after a resume."""
    purpose: str = "train"
    first_try: int = 0
    """Number of the first try; above 0 after a resume, so that no rollout_id comes twice."""
    temperature: float | None = None
    """Instead of rollout.temperature (evaluation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """One try of one member."""

    group: GroupTask
    member: int
    try_number: int
    engine: str
    """Every model call of the rollout goes to this engine, so that its prefix cache is warm."""

    @property
    def rollout_id(self) -> str:
        """group_id, member and try."""
        return f"{self.group.group_id}/{self.member}/{self.try_number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDone:
    """A rollout whose segments are durable in the log."""

    rollout_id: str
    group_id: str
    member: int
    engine: str
    num_segments: int
    num_turns: int
    n_tokens: int
    n_sampled: int
    reward: float | None
    version_min: int | None
    is_truncated: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailed:
    """A rollout that left no segment."""

    rollout_id: str
    group_id: str
    member: int
    engine: str
    reason: FailureReason
    error: str
    """Type and text."""
    n_sampled: int
    """Tokens that were sampled and are lost to training."""
    num_tries: int
    """Tries made so far for this member, those of earlier attempts included."""
    is_retryable: bool = True
    """Whether another try may end differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group with nothing left to run: every member asked for is done or has failed for good."""

    group: GroupTask
    done: tuple[RolloutDone, ...]
    failed: tuple[RolloutFailed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitTimes:
    """What one refit of all engines took: the columns of weights_refit that the pool knows."""

    policy_version: int
    weights_digest: str
    """model_digest over the digests sent."""
    engines: dict[str, str]
    """Engine to the digest that it reported."""
    pause_s: float
    transfer_s: float
    verify_s: float
    resume_s: float
    size_bytes: int
    num_in_flight: int
    caches: tuple[str, ...] = ()
    """What engines dropped of what old weights had made."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engine to error; such an engine is out of service until it takes a later refit."""


LONGEST_ERROR = 4000
"""Characters of an error that the log keeps; an agent may raise with a whole page that a server answered."""


def shortened(error: str) -> str:
    """Beginning and end of a long text, and how much was between them."""
    if len(error) <= LONGEST_ERROR:
        return error
    half = LONGEST_ERROR // 2
    return f"{error[:half]} ... {len(error) - 2 * half} characters left out ... {error[-half:]}"


def failed_rollout(task: RolloutTask, reason: FailureReason, error: str, *, n_sampled: int = 0, is_retryable: bool = True) -> RolloutFailed:
    """The outcome of a try that left nothing."""
    return RolloutFailed(
        rollout_id=task.rollout_id,
        group_id=task.group.group_id,
        member=task.member,
        engine=task.engine,
        reason=reason,
        error=shortened(error),
        n_sampled=n_sampled,
        num_tries=task.try_number + 1,
        is_retryable=is_retryable,
    )


FOUND_COLUMNS = ("num_segments", "num_turns", "n_tokens", "n_sampled", "reward", "version_min", "is_truncated", "started_at", "finished_at")
"""Columns of the segments table that say how a rollout ended."""


def done_from_rows(task: RolloutTask, rows: Sequence[Mapping[str, Any]]) -> RolloutDone | None:
    """The outcome of a rollout from its committed segments; None without any. They are committed together, so all are there."""
    if not rows:
        return None
    assert len(rows) == rows[0]["num_segments"], "the segments of a rollout are committed together"
    versions = [row["version_min"] for row in rows if row["version_min"] is not None]
    return RolloutDone(
        rollout_id=task.rollout_id,
        group_id=task.group.group_id,
        member=task.member,
        engine=task.engine,
        num_segments=len(rows),
        num_turns=sum(row["num_turns"] for row in rows),
        n_tokens=sum(row["n_tokens"] for row in rows),
        n_sampled=sum(row["n_sampled"] for row in rows),
        reward=rows[0]["reward"],
        version_min=min(versions, default=None),
        is_truncated=any(row["is_truncated"] for row in rows),
        duration_s=max(row["finished_at"] for row in rows) - min(row["started_at"] for row in rows),
    )
