"""One batch on flat ragged axes: sampled tokens, segments, rollouts, groups.

Axes, in every name of this package:
    T  sampled tokens of the batch, segment after segment (prompts and observations are not on it)
    S  segments (token-exact sequences), in batch order
    R  rollouts (episodes); a rollout has one segment or several
    G  groups (all rollouts of one prompt)
    U  what an estimator pays: rollouts or segments, as it declares
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from molt.errors import DataError


class BatchRow(Protocol):
    """The scalars of one segment that a batch is made from (molt.admission.plan.SegmentRow has them)."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def group_id(self) -> str: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_sampled(self) -> int: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def outcome(self) -> float | None: ...
    @property
    def is_truncated(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Lengths, ownership and rewards of one batch. Order carries no meaning: rollouts and groups are found by index."""

    lengths_S: Tensor
    """int64: sampled tokens of each segment; 0 is allowed."""
    n_tokens_S: Tensor
    """int64: all tokens of each segment, prompt and observations included."""
    rollout_S: Tensor
    """int64: place of the segment's rollout on R."""
    group_R: Tensor
    """int64: place of the rollout's group on G."""
    reward_R: Tensor
    """float32: reward of the whole rollout; NaN when it could not be scored."""
    outcome_R: Tensor
    """float32: unshaped outcome; NaN when the agent gave none."""
    is_truncated_R: Tensor
    """bool: a limit ended the rollout."""
    is_trainable_T: Tensor | None = None
    """bool: sampled tokens that may reach the gradient; None is all of them."""

    @classmethod
    def from_rows(cls, rows: Sequence[BatchRow], *, is_trainable_T: Tensor | None = None) -> RaggedBatch:
        """Batch of segments in the order given. DataError when segments of one rollout disagree about it."""
        rollouts: dict[str, int] = {}
        groups: dict[str, int] = {}
        owners: list[tuple[int, float, float, bool]] = []
        rollout_S = []
        for row in rows:
            facts = (groups.setdefault(row.group_id, len(groups)), _or_nan(row.reward), _or_nan(row.outcome), row.is_truncated)
            place = rollouts.setdefault(row.rollout_id, len(rollouts))
            if place == len(owners):
                owners.append(facts)
            elif repr(owners[place]) != repr(facts):
                raise DataError(f"rollout {row.rollout_id}: its segments disagree on group, reward, outcome or truncation")
            rollout_S.append(place)
        return cls(
            lengths_S=torch.tensor([row.n_sampled for row in rows], dtype=torch.int64),
            n_tokens_S=torch.tensor([row.n_tokens for row in rows], dtype=torch.int64),
            rollout_S=torch.tensor(rollout_S, dtype=torch.int64),
            group_R=torch.tensor([owner[0] for owner in owners], dtype=torch.int64),
            reward_R=torch.tensor([owner[1] for owner in owners], dtype=torch.float32),
            outcome_R=torch.tensor([owner[2] for owner in owners], dtype=torch.float32),
            is_truncated_R=torch.tensor([owner[3] for owner in owners], dtype=torch.bool),
            is_trainable_T=is_trainable_T,
        )

    @property
    def num_tokens(self) -> int:
        """Length of T: the token-mean denominator."""
        return int(self.lengths_S.sum())

    @property
    def num_segments(self) -> int:
        """Length of S."""
        return len(self.lengths_S)

    @property
    def num_rollouts(self) -> int:
        """Length of R."""
        return len(self.group_R)

    @property
    def num_groups(self) -> int:
        """Length of G."""
        return int(self.group_R.max()) + 1 if len(self.group_R) else 0

    @property
    def segment_T(self) -> Tensor:
        """int64: place of each sampled token's segment on S."""
        return torch.repeat_interleave(torch.arange(self.num_segments), self.lengths_S)

    @property
    def rollout_T(self) -> Tensor:
        """int64: place of each sampled token's rollout on R."""
        return torch.repeat_interleave(self.rollout_S, self.lengths_S)

    @property
    def group_S(self) -> Tensor:
        """int64: place of each segment's group on G."""
        return self.group_R[self.rollout_S]

    @property
    def is_scored_R(self) -> Tensor:
        """bool: rollouts that have a reward."""
        return ~torch.isnan(self.reward_R)

    @property
    def n_sampled_R(self) -> Tensor:
        """int64: sampled tokens of each rollout, its segments together."""
        return torch.zeros(self.num_rollouts, dtype=torch.int64).index_add_(0, self.rollout_S, self.lengths_S)

    @property
    def longest_R(self) -> Tensor:
        """int64: tokens of the longest segment of each rollout."""
        zeros_R = torch.zeros(self.num_rollouts, dtype=torch.int64)
        return zeros_R.scatter_reduce_(0, self.rollout_S, self.n_tokens_S, "amax")

    def trainable_T(self) -> Tensor:
        """bool: is_trainable_T, all true when it was not given."""
        return torch.ones(self.num_tokens, dtype=torch.bool) if self.is_trainable_T is None else self.is_trainable_T

    def with_reward(self, reward_R: Tensor) -> RaggedBatch:
        """The same batch under other rewards."""
        return replace(self, reward_R=reward_R)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def sum_by(values_N: Tensor, place_N: Tensor, num_places: int) -> Tensor:
    """Sums of values by place, in float64 and in order, so that the result does not depend on threads. # (num_places,)"""
    return torch.zeros(num_places, dtype=torch.float64, device=values_N.device).index_add_(0, place_N, values_N.double())


def sum_by_segment(values_T: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
    """Sums over each segment, float64, the same bits on every call; segment_T is non-decreasing. # (S,)

    On a GPU one thread adds up one segment: adding by index would add in whatever order its threads come.
    """
    if values_T.device.type == "cpu":
        return sum_by(values_T, segment_T, num_segments)
    lengths_S = torch.bincount(segment_T, minlength=num_segments)
    return torch.segment_reduce(values_T.double(), "sum", lengths=lengths_S)


def mean_by(values_N: Tensor, place_N: Tensor, num_places: int, is_counted_N: Tensor | None = None) -> Tensor:
    """Means of counted values by place, float64; 0 where nothing counts. # (num_places,)"""
    if is_counted_N is not None:
        values_N, place_N = values_N[is_counted_N], place_N[is_counted_N]
    count = torch.bincount(place_N, minlength=num_places)
    return sum_by(values_N, place_N, num_places) / count.clamp(min=1)


def total(values_N: Tensor) -> float:
    """Sum in float64 by one thread and in one order: the same bits under any number of threads."""
    return float(values_N.detach().double().cpu().numpy().sum())
