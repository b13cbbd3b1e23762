"""What an estimator sees of a batch: the axis U that it pays, rewards on it, and the ways from U to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molt.algo.batch import RaggedBatch, mean_by, sum_by

if TYPE_CHECKING:
    from molt.config import AlgoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """One batch, seen by unit (axes: molt.algo.batch). Everything is float64 or int64, on the CPU."""

    batch: RaggedBatch
    settings: AlgoSettings
    unit_T: Tensor
    """int64: the unit of each sampled token."""
    group_U: Tensor
    """int64: the group of each unit."""
    reward_U: Tensor
    """float64: 0 where is_scored_U is false."""
    is_scored_U: Tensor
    is_counted_T: Tensor
    """bool: tokens that may reach the gradient and whose rollout counts."""
    penalty_T: Tensor | None
    """float64: reward per token from the divergence, -coef * kl; None when it is off or a loss."""
    values_T: Tensor | None
    logprobs_T: Tensor | None
    teacher_logprobs_T: Tensor | None

    @classmethod
    def of(
        cls,
        batch: RaggedBatch,
        settings: AlgoSettings,
        *,
        unit: str,
        uses_reward: bool,
        kl_T: Tensor | None,
        values_T: Tensor | None,
        logprobs_T: Tensor | None,
        teacher_logprobs_T: Tensor | None,
    ) -> EstimatorInputs:
        """The view of a batch by rollout or by segment."""
        is_rollout = unit == "rollout"
        unit_T = batch.rollout_T if is_rollout else batch.segment_T
        reward_U = batch.reward_R if is_rollout else batch.reward_R[batch.rollout_S]
        is_scored_U = ~torch.isnan(reward_U)
        trainable_T = batch.trainable_T()
        has_penalty = kl_T is not None and settings.kl.use == "reward" and settings.kl.coef > 0
        return cls(
            batch=batch,
            settings=settings,
            unit_T=unit_T,
            group_U=batch.group_R if is_rollout else batch.group_S,
            reward_U=torch.where(is_scored_U, reward_U, 0.0).double(),
            is_scored_U=is_scored_U,
            is_counted_T=trainable_T & is_scored_U[unit_T] if uses_reward else trainable_T,
            penalty_T=torch.where(trainable_T, -settings.kl.coef * kl_T.double(), 0.0) if has_penalty and kl_T is not None else None,
            values_T=_double(values_T),
            logprobs_T=_double(logprobs_T),
            teacher_logprobs_T=_double(teacher_logprobs_T),
        )

    @property
    def scored_in_group_U(self) -> Tensor:
        """int64: scored units in the group of each unit."""
        return torch.bincount(self.group_U[self.is_scored_U], minlength=self.batch.num_groups)[self.group_U]

    @property
    def is_constant_U(self) -> Tensor:
        """bool: units whose group has one distinct reward, or none."""
        high_G = torch.full((self.batch.num_groups,), -torch.inf, dtype=torch.float64)
        low_G = torch.full((self.batch.num_groups,), torch.inf, dtype=torch.float64)
        group_U, reward_U = self.group_U[self.is_scored_U], self.reward_U[self.is_scored_U]
        high_G.scatter_reduce_(0, group_U, reward_U, "amax")
        low_G.scatter_reduce_(0, group_U, reward_U, "amin")
        return (high_G <= low_G)[self.group_U]

    @property
    def num_constant_groups(self) -> int:
        """Groups with one distinct reward, or none."""
        return len(torch.unique(self.group_U[self.is_constant_U]))

    def mean_of_group_U(self) -> Tensor:
        """float64: mean reward over the scored units of each unit's group."""
        return mean_by(self.reward_U, self.group_U, self.batch.num_groups, self.is_scored_U)[self.group_U]

    def centred_by_group(self) -> Tensor:
        """float64: reward minus the group mean; exactly 0 for unscored units and for groups of equal rewards. # (U,)"""
        dead_U = self.is_constant_U | ~self.is_scored_U
        return torch.where(dead_U, 0.0, self.reward_U - self.mean_of_group_U())

    def std_of_group_U(self) -> Tensor:
        """float64: sample deviation (n - 1) of the scored rewards of each unit's group; 0 for one. # (U,)"""
        square_G = sum_by(self.centred_by_group().square(), self.group_U, self.batch.num_groups)
        return (square_G[self.group_U] / (self.scored_in_group_U - 1).clamp(min=1)).sqrt()

    def spread(self, values_U: Tensor) -> Tensor:
        """The value of its unit at every sampled token. # (T,)"""
        return values_U[self.unit_T]

    def returns(self, final_U: Tensor) -> Tensor:
        """Discounted return at each trainable token when final_U arrives at the unit's last one. # (T,)

        Trainable tokens alone count as time: prompts, observations and masked tokens between them are transparent. Tokens of a
        rollout form one sequence over its segments, in batch order. The divergence, where it is a reward, is added per token.
        """
        gamma = self.settings.advantage.gamma
        returns_T = self.spread(final_U)
        if gamma != 1:
            returns_T = returns_T * torch.pow(torch.tensor(gamma, dtype=torch.float64), self.steps_to_end_T())
        if self.penalty_T is not None:
            returns_T = returns_T + self.suffix_sum(self.penalty_T, gamma)
        return returns_T

    def final_rewards_T(self) -> Tensor:
        """float64: the reward at the last trainable token of each unit, and the divergence where it is a reward. # (T,)"""
        rewards_T = torch.where(self.is_counted_T & (self.steps_to_end_T() == 0), self.spread(self.reward_U), 0.0)
        return rewards_T if self.penalty_T is None else rewards_T + self.penalty_T

    def next_T(self, values_T: Tensor) -> Tensor:
        """The value at the next trainable token of the same unit, 0 after the last. # (T,)"""
        place_K = self.timeline_K()
        unit_K, values_K = self.unit_T[place_K], values_T[place_K]
        next_K = torch.zeros_like(values_K)
        next_K[:-1] = torch.where(unit_K[1:] == unit_K[:-1], values_K[1:], 0.0)
        return torch.zeros_like(values_T).scatter_(0, place_K, next_K)

    def steps_to_end_T(self) -> Tensor:
        """int64: trainable tokens of the same unit after each trainable token; 0 elsewhere. # (T,)"""
        place_K = self.timeline_K()
        unit_K = self.unit_T[place_K]
        last_U = torch.bincount(unit_K, minlength=len(self.reward_U)).cumsum(0) - 1
        return torch.zeros_like(self.unit_T).scatter_(0, place_K, last_U[unit_K] - torch.arange(len(unit_K)))

    def timeline_K(self) -> Tensor:
        """int64: places on T of the counted tokens, unit after unit, each in its order of time. # (K,)"""
        place_K = self.is_counted_T.nonzero().squeeze(1)
        unit_K = self.unit_T[place_K]
        if len(unit_K) < 2 or bool((unit_K[1:] >= unit_K[:-1]).all()):
            return place_K
        return place_K[torch.argsort(unit_K, stable=True)]

    def suffix_sum(self, values_T: Tensor, decay: float) -> Tensor:
        """y[t] = x[t] + decay * y[next trainable token] inside each unit; 0 elsewhere. # (T,)

        By doubling: pass k adds decay^(2^k) times the value 2^k later, so passes grow with the log of the longest unit
        and the result of one unit does not depend on the others.
        """
        place_K = self.timeline_K()
        unit_K, sums_K = self.unit_T[place_K], values_T[place_K].double()
        longest = int(torch.bincount(unit_K, minlength=1).max())
        shift, factor = 1, decay
        while shift < longest and factor != 0:
            later_K = torch.where(unit_K[shift:] == unit_K[:-shift], sums_K[shift:] * factor, 0.0)
            sums_K = torch.cat([sums_K[:-shift] + later_K, sums_K[-shift:]])
            shift, factor = shift * 2, factor * factor
        return torch.zeros(len(values_T), dtype=torch.float64).scatter_(0, place_K, sums_K)


def _double(values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T.double()
