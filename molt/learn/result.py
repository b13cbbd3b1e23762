"""What one step says of itself: to the driver, to the log, and to replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class RefusalReason(StrEnum):
    """Why a planned step was not made."""

    NON_FINITE = "non_finite"
    """A log-prob, loss or gradient is not finite."""
    NOTHING_KEPT = "nothing_kept"
    """No trainable token is left after the gate."""
    LINEAGE = "lineage"
    """A trainable token lacks its log-prob or version, or a row differs from its plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A step that was planned and not made: weights and optimizer are as before."""

    reason: RefusalReason
    error: str
    """What was found, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """One segment used by one step: what a consumption row needs from the trainer."""

    segment_id: str
    place: int
    """In plan.segments."""
    rank: int
    micro_batch: int
    position: int
    n_sampled: int
    n_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What the log says of a step that is replayed."""

    batch_digest: str
    loss_digest: str
    weights_digest: str | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """Columns of FIGURES by name."""


FIGURES = ("loss", "grad_norm", "learning_rate", "n_sampled", "n_kept", "reward_mean", "kl_mean", "entropy_mean")
"""Columns of a step, beside its digests, that come out alike when it is trained again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step over all ranks; the columns of schemas/events/step_trained.sql but the wait."""

    step: int
    policy_version: int
    """Of the weights at step start."""
    loss: float
    grad_norm: float
    learning_rate: float
    n_sampled: int
    n_kept: int
    reward_mean: float | None
    kl_mean: float | None
    entropy_mean: float | None
    batch_digest: str
    loss_digest: str
    weights_digest: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    log_s: float = 0.0
    """Seconds that the step stood still for the log: for the plan's ack, for rows, and for the acks of what the step before wrote."""
    uses: tuple[SegmentUse, ...] = ()
    """In plan order."""
    refused: Refusal | None = None
    """Set when no update was made; the numbers are then what was known."""
