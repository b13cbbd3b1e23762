"""What one rank holds while it trains one step: micro-batches, token columns, and what is known of the whole batch.

Axes: molt.algo.batch; N sampled tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from molt.admission.plan import StepPlan
from molt.algo.advantage import Advantages
from molt.algo.correction import Gate, importance_gate
from molt.config import AlgoSettings
from molt.learn.rows import MicroBatch, Row
from molt.learn.tally import Sums


@dataclass(slots=True)
class Columns:
    """Token columns of a rank, one tensor (N,) for each of its micro-batches, on the CPU. Empty lists are not there."""

    logprobs: list[torch.Tensor] = field(default_factory=list)
    """Of the trainer at step start."""
    reference: list[torch.Tensor] = field(default_factory=list)
    teacher: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    """Of the critic at step start."""
    gates: list[Gate] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """What every rank computes alike over the whole batch."""

    advantages: Advantages
    scale_T: torch.Tensor
    offsets: np.ndarray
    """(S + 1,) int64."""
    metrics: dict[str, float]

    def of(self, column_T: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The tokens of one micro-batch of a column over T. # (N,)"""
        parts = [column_T[self.offsets[p] : self.offsets[p + 1]] for p in batch.places]
        return torch.cat(parts) if parts else column_T[:0]

    def advantages_of(self, batch: MicroBatch) -> torch.Tensor:
        """Advantages of one micro-batch. # (N,)"""
        return self.of(self.advantages.advantages_T, batch)

    def scale_of(self, batch: MicroBatch) -> torch.Tensor:
        """Loss scale of one micro-batch. # (N,)"""
        return self.of(self.scale_T, batch)

    def value_scale_of(self, batch: MicroBatch) -> torch.Tensor:
        """Loss scale of the critic: 0 also at tokens of rollouts without a reward, which have no return. # (N,)"""
        return torch.where(self.of(self.advantages.is_counted_T, batch), self.scale_of(batch), 0.0)

    def returns_of(self, batch: MicroBatch) -> torch.Tensor:
        """Targets of the critic of one micro-batch. # (N,)"""
        assert self.advantages.returns_T is not None, "the estimator made no returns"
        return self.of(self.advantages.returns_T, batch)


@dataclass(slots=True, kw_only=True)
class Step:
    """One step on one rank, as it goes."""

    plan: StepPlan
    algo: AlgoSettings
    """With the coefficient of the divergence that is in force."""
    rows: dict[int, Row]
    """Place in plan.segments to its row."""
    batches: list[MicroBatch]
    columns: Columns
    whole: WholeBatch | None = None
    sums: Sums = field(default_factory=Sums)
    is_actor_frozen: bool = False
    """Only the critic learns in this step."""

    @property
    def known(self) -> WholeBatch:
        """The whole batch, once it is known."""
        assert self.whole is not None, "the whole batch is not known yet"
        return self.whole


def empty_gate(step: Step, number: int) -> Gate:
    """A gate that keeps nothing: of a dummy, or of a micro-batch that was refused."""
    batch = step.batches[number]
    count = len(batch.behaviour_N)
    return importance_gate(
        torch.zeros(count),
        torch.zeros(count),
        batch.packed.row_N[:count],
        step.algo,
        num_segments=len(batch.places),
        is_trainable_T=torch.zeros(count, dtype=torch.bool),
        version_T=torch.zeros(count, dtype=torch.int64),
        trainer_version=step.plan.policy_version,
    )
