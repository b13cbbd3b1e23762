"""Sums over groups that every measure of an ablation is made from, with a paired bootstrap that needs no second pass.

    a step  ->  advantages of each estimator, weights of each gate  ->  sums per group  ->  added under B + 1 sets of weights

Set 0 weighs every group with 1: the measured value. The others draw a Poisson(1) count for each group (a bootstrap for streams),
the same counts for every variant, so differences between variants are paired. Memory holds one batch and B + 1 rows of sums.

Axes besides molt.algo.batch: E estimators, K gates, A aggregations, B resamples; S runs over segments with sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from molt.ablate.record import ScoredStep
from molt.ablate.variants import Grid, Variant
from molt.algo.advantage import compute_advantages
from molt.algo.batch import RaggedBatch
from molt.algo.correction import importance_gate
from molt.algo.estimators import get_estimator
from molt.algo.kl import kl_estimate
from molt.algo.loss import token_scale
from molt.algo.reward import shape_rewards
from molt.config import Config

COMMON = ("n_groups", "n", "n_trainable", "num_rollouts", "x", "xx")
"""x is the length of a rollout in sampled tokens."""
BY_GATE = ("n_kept", "w", "ww")
BY_ESTIMATOR = ("a", "aa", "aaa", "aaaa")
"""Powers of the advantage over trainable tokens."""
BY_PAIR = ("n_effective", "s", "ss", "n_agree", "n_differ", "y", "yy", "xy")
"""s = weight * advantage of a token; y = mean of s over a rollout's tokens."""
BY_TRIPLE = ("loss", "z", "zz", "xz")
"""loss = -sum(scale * s) at step start; z = sum(scale * |s|) of a rollout: what it moves."""


@dataclass(slots=True)
class Sums:
    """Totals under B + 1 sets of group weights, float64."""

    common: np.ndarray
    """(B + 1, len(COMMON))"""
    by_gate: np.ndarray
    """(B + 1, K, len(BY_GATE))"""
    by_estimator: np.ndarray
    """(B + 1, E, len(BY_ESTIMATOR))"""
    by_pair: np.ndarray
    """(B + 1, E, K, len(BY_PAIR))"""
    by_triple: np.ndarray
    """(B + 1, E, K, A, len(BY_TRIPLE))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What one batch adds."""

    sums: Sums
    unavailable: dict[str, str]
    num_groups: int
    n_sampled: int


@dataclass(slots=True)
class Tally:
    """Adds up the steps of one run under one grid."""

    grid: Grid
    config: Config
    baseline: Variant
    num_resamples: int
    seed: int
    num_steps: int = 0
    num_groups: int = 0
    n_sampled: int = 0
    unavailable: dict[str, str] = field(default_factory=dict)
    """Estimators that the log cannot feed, and why."""
    sums: Sums | None = None

    def add(self, step: ScoredStep) -> None:
        """Measure and take in one batch."""
        self.take(self.measure(step))

    def take(self, found: StepSums) -> None:
        """Take in one measured batch; batches add in the order taken."""
        if self.sums is None:
            self.sums = found.sums
        else:
            for name in Sums.__dataclass_fields__:
                setattr(self.sums, name, getattr(self.sums, name) + getattr(found.sums, name))
        self.unavailable |= found.unavailable
        self.num_steps += 1
        self.num_groups += found.num_groups
        self.n_sampled += found.n_sampled

    def measure(self, step: ScoredStep) -> StepSums:
        """The sums of one batch. It changes nothing here, so batches may be measured at the same time."""
        shaped = shape_rewards(step.batch, self.config.algo, max_len=self.config.data.max_len).batch
        advantages_ET, unavailable = self.advantages(step, shaped)
        weights_KT, kept_KT = self.weights(step)
        groups = _Groups.of(step.batch)
        parts = self._group_sums(step.batch, groups, advantages_ET, weights_KT, kept_KT)
        counts_BG = np.random.default_rng((self.seed, step.step)).poisson(1.0, (self.num_resamples, groups.num_groups)).astype(np.float64)
        counts_BG = np.concatenate([np.ones((1, groups.num_groups)), counts_BG])
        return StepSums(
            sums=Sums(*(np.tensordot(counts_BG, part, axes=1) for part in parts)),
            unavailable=unavailable,
            num_groups=groups.num_groups,
            n_sampled=step.batch.num_tokens,
        )

    def advantages(self, step: ScoredStep, shaped: RaggedBatch) -> tuple[np.ndarray, dict[str, str]]:
        """Advantages of every estimator, zeros for one that lacks a column, and which do. # (E, T)"""
        unavailable = {}
        rows = np.zeros((len(self.grid.estimators), step.batch.num_tokens), np.float32)
        for place, choice in enumerate(self.grid.estimators):
            settings = choice.settings(self.config.algo)
            has_kl_reward = settings.kl.use == "reward" and settings.kl.coef > 0
            missing = _missing(step, choice.name, has_kl_reward)
            if missing:
                unavailable[choice.text] = f"the log of step {step.step} holds no {', '.join(missing)}"
                continue
            reference_T = step.columns["reference_logprobs"] if has_kl_reward else None
            found = compute_advantages(
                choice.name,
                shaped,
                settings,
                kl_T=None if reference_T is None else kl_estimate(settings.kl.estimator, step.trainer_logprobs_T, reference_T),
                values_T=step.columns["values"],
                logprobs_T=step.trainer_logprobs_T,
                teacher_logprobs_T=teacher_of(step),
            )
            rows[place] = found.advantages_T.numpy()
        return rows, unavailable

    def weights(self, step: ScoredStep) -> tuple[np.ndarray, np.ndarray]:
        """Weights and kept flags of every gate. # (K, T) twice"""
        batch, segment_T, gates = step.batch, step.batch.segment_T, []
        for choice in self.grid.gates:
            gates.append(
                importance_gate(
                    step.trainer_logprobs_T,
                    step.behaviour_logprobs_T,
                    segment_T,
                    choice.settings(self.config.algo),
                    num_segments=batch.num_segments,
                    is_trainable_T=batch.is_trainable_T,
                    version_T=step.version_T if choice.keys["decoupled"] else None,
                    trainer_version=step.plan.policy_version,
                )
            )
        return torch.stack([gate.weights_T for gate in gates]).numpy(), torch.stack([gate.is_kept_T for gate in gates]).numpy()

    def _group_sums(
        self, batch: RaggedBatch, groups: _Groups, advantages_ET: np.ndarray, weights_KT: np.ndarray, kept_KT: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """The five blocks of sums, one row a group."""
        num_e, num_k = len(advantages_ET), len(weights_KT)
        scale_AR = np.stack([groups.scale_R(token_scale(name, batch)) for name in self.grid.aggregations])
        x_R = groups.length_R
        common = np.stack(
            [
                np.ones(groups.num_groups),
                groups.group(x_R),
                groups.group(groups.rollout(batch.trainable_T().numpy())),
                groups.group(np.ones_like(x_R)),
                groups.group(x_R),
                groups.group(x_R * x_R),
            ],
            axis=1,
        )
        by_gate = np.stack(
            [
                np.stack([groups.group(groups.rollout(c)) for c in (kept, weights, weights * weights)], axis=1)
                for kept, weights in zip(kept_KT, weights_KT, strict=True)
            ],
            axis=1,
        )
        by_estimator = np.stack([_powers(groups, advantages_T) for advantages_T in advantages_ET], axis=1)
        base_e = [choice.text for choice in self.grid.estimators].index(self.baseline.estimator)
        base_k = [choice.text for choice in self.grid.gates].index(self.baseline.gate)
        base_T = np.sign(advantages_ET[base_e] * weights_KT[base_k])
        by_pair = np.zeros((groups.num_groups, num_e, num_k, len(BY_PAIR)))
        by_triple = np.zeros((groups.num_groups, num_e, num_k, len(scale_AR), len(BY_TRIPLE)))
        for e, advantages_T in enumerate(advantages_ET):
            for k, weights_T in enumerate(weights_KT):
                signal_T = advantages_T * weights_T
                s_R, moved_R, by_pair[:, e, k] = _pair(groups, signal_T, base_T)
                for a, scale_R in enumerate(scale_AR):
                    z_R = scale_R * moved_R
                    columns = (-scale_R * s_R, z_R, z_R * z_R, x_R * z_R)
                    by_triple[:, e, k, a] = np.stack([groups.group(column) for column in columns], axis=1)
        return common, by_gate, by_estimator, by_pair, by_triple


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Sums from tokens to rollouts to groups. R here runs over rollouts with sampled tokens, the others carry nothing."""

    starts_S: np.ndarray
    rollout_S: np.ndarray
    group_R: np.ndarray
    length_R: np.ndarray
    num_groups: int

    @classmethod
    def of(cls, batch: RaggedBatch) -> _Groups:
        lengths_S = batch.lengths_S.numpy()
        ends_S = np.cumsum(lengths_S)
        is_sampled_S = lengths_S > 0
        rollouts, rollout_S = np.unique(batch.rollout_S.numpy()[is_sampled_S], return_inverse=True)
        groups, group_R = np.unique(batch.group_R.numpy()[rollouts], return_inverse=True)
        return cls(
            starts_S=(ends_S - lengths_S)[is_sampled_S],
            rollout_S=rollout_S,
            group_R=group_R,
            length_R=batch.n_sampled_R.numpy()[rollouts].astype(np.float64),
            num_groups=len(groups),
        )

    def rollout(self, values_T: np.ndarray) -> np.ndarray:
        """Sums by rollout, float64. # (R,)"""
        if not len(self.starts_S):
            return np.zeros(0)
        kind = np.float32 if values_T.dtype == np.float32 else np.int64
        sums_S = np.add.reduceat(values_T, self.starts_S, dtype=kind).astype(np.float64)
        return np.bincount(self.rollout_S, weights=sums_S, minlength=len(self.group_R))

    def group(self, values_R: np.ndarray) -> np.ndarray:
        """Sums by group. # (G,)"""
        return np.bincount(self.group_R, weights=values_R, minlength=self.num_groups)

    def scale_R(self, scale_T: torch.Tensor) -> np.ndarray:
        """The loss scale of each rollout: one number for all its trainable tokens. # (R,)"""
        largest_S = np.maximum.reduceat(scale_T.numpy(), self.starts_S) if len(self.starts_S) else np.zeros(0, np.float32)
        scale_R = np.zeros(len(self.group_R))
        np.maximum.at(scale_R, self.rollout_S, largest_S)
        return scale_R


def teacher_of(step: ScoredStep) -> torch.Tensor | None:
    """Log-probs of the frozen model of the run, as a teacher: what distilling towards the reference would do. # (T,)"""
    own = step.columns["teacher_logprobs"]
    return step.columns["reference_logprobs"] if own is None else own


def _missing(step: ScoredStep, name: str, has_kl_reward: bool) -> list[str]:
    """Columns that an estimator needs and the step lacks."""
    needs = get_estimator(name).needs
    found = {"values": step.columns["values"], "teacher_logprobs": teacher_of(step)}
    missing = [need for need in sorted(needs) if need in found and found[need] is None]
    return [*missing, *(["reference_logprobs"] if has_kl_reward and step.columns["reference_logprobs"] is None else [])]


def _powers(groups: _Groups, advantages_T: np.ndarray) -> np.ndarray:
    square_T = advantages_T * advantages_T
    columns = (advantages_T, square_T, square_T * advantages_T, square_T * square_T)
    return np.stack([groups.group(groups.rollout(column)) for column in columns], axis=1)


def _pair(groups: _Groups, signal_T: np.ndarray, base_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sum of s by rollout, sum of |s| by rollout, the columns of BY_PAIR by group)."""
    s_R, moved_R = groups.rollout(signal_T), groups.rollout(np.abs(signal_T))
    both_T = signal_T * base_T
    y_R = s_R / groups.length_R
    columns = (
        groups.rollout(signal_T != 0),
        s_R,
        groups.rollout(signal_T * signal_T),
        groups.rollout(both_T > 0),
        groups.rollout(both_T < 0),
        y_R,
        y_R * y_R,
        groups.length_R * y_R,
    )
    return s_R, moved_R, np.stack([groups.group(column) for column in columns], axis=1)
