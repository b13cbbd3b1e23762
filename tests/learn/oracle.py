"""A step computed anew in float64, token by token, from the formulas of docs/algorithms.md; no code of molt.algo takes part."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from molt.admission.plan import SegmentRow
from molt.config import AlgoSettings, Config
from molt.learn.rows import Row
from tests.learn.tiny import VOCAB

VERSION = 3
Column = dict[str, list[float]]
"""A number for each sampled token, by segment."""


def make_batch(seed: int, *, is_mixed: bool) -> tuple[list[Row], list[SegmentRow]]:
    """Groups of one to four, rollouts of one, two or twelve segments, masks with holes, segments without a sampled token, rollouts that
    were cut or could not be scored. is_mixed: of several policy versions."""
    dice, noise = random.Random(seed), np.random.default_rng(seed)
    rows, segments = [], []
    for group in range(dice.choice([1, 2, 3])):
        for member in range(dice.choice([1, 2, 3, 4])):
            rollout_id = f"e0-p{group}/{member}/0"
            reward = dice.choice([None, 0.0, 1.0, 1.0, -0.5, 0.3])
            is_truncated = dice.random() < 0.3
            for index in range(dice.choice([1, 1, 2, 12])):
                length = dice.choice([2, 3, 9, 16, 30]) if index < 2 else 4
                is_sampled = (np.arange(length) > 0) & (noise.random(length) < dice.choice([0.0, 0.6, 1.0]))
                versions = np.full(length, -1, np.int32)
                versions[is_sampled] = sorted(dice.choice([1, 2, 3]) if is_mixed else 2 for _ in range(int(is_sampled.sum())))
                row = Row(
                    segment_id=f"{rollout_id}/{index}",
                    token_ids=noise.integers(0, VOCAB, length).astype(np.int32),
                    is_sampled=is_sampled,
                    is_trainable=is_sampled & (noise.random(length) < dice.choice([1.0, 0.7])),
                    behaviour_logprobs=np.zeros(length, np.float32),
                    policy_versions=versions,
                    temperature=dice.choice([1.0, 0.7, 1.3]),
                )
                known = versions[is_sampled]
                rows.append(row)
                segments.append(
                    SegmentRow(
                        segment_id=row.segment_id,
                        rollout_id=rollout_id,
                        group_id=f"e0-p{group}",
                        prompt_index=group,
                        lsn=len(rows),
                        n_tokens=length,
                        n_sampled=len(known),
                        version_min=int(known.min()) if len(known) else None,
                        version_max=int(known.max()) if len(known) else None,
                        reward=reward,
                        outcome=None,
                        is_truncated=is_truncated,
                    )
                )
    return rows, segments


def double_model(folder: Path) -> torch.nn.Module:
    """The model in float64, with its plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def scores(model: torch.nn.Module, row: Row) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-prob and entropy of each sampled token, the row alone in a batch."""
    logp = torch.log_softmax(model(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0] / row.temperature, -1)
    places = np.flatnonzero(row.is_sampled)
    return [logp[p - 1, int(row.token_ids[p])] for p in places], [-(logp[p - 1].exp() * logp[p - 1]).sum() for p in places]


def with_behaviour(rows: list[Row], model: torch.nn.Module, seed: int) -> list[Row]:
    """Rows whose engine was off by nothing, a little or much."""
    noise = np.random.default_rng(seed)
    found = []
    for row in rows:
        with torch.no_grad():
            exact = [float(value) for value in scores(model, row)[0]]
        column = np.full(len(row.token_ids), np.nan, np.float32)
        column[row.is_sampled] = np.minimum(exact + noise.normal(0, noise.choice([0.0, 0.4, 2.5], p=[0.3, 0.6, 0.1]), len(exact)), 0)
        found.append(replace(row, behaviour_logprobs=column))
    return found


@dataclass
class Oracle:
    """One step. rows and segments: those of a rollout in the order in which they came about."""

    config: Config
    rows: list[Row]
    segments: list[SegmentRow]
    model: torch.nn.Module
    reference: torch.nn.Module | None = None
    loss: float = 0.0
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    advantages: Column = field(default_factory=dict)
    weights: Column = field(default_factory=dict)

    def compute(self) -> Oracle:
        """Fill what is expected."""
        algo = self.config.algo
        self.now = {row.segment_id: scores(self.model, row) for row in self.rows}
        self.old = {name: [float(value.detach()) for value in found[0]] for name, found in self.now.items()}
        self.frozen: Column = {}
        if self.reference is not None:
            with torch.no_grad():
                self.frozen = {row.segment_id: [float(value) for value in scores(self.reference, row)[0]] for row in self.rows}
        self.trains = {row.segment_id: row.is_trainable[row.is_sampled].tolist() for row in self.rows}
        self.rollouts: dict[str, list[SegmentRow]] = {}
        for segment in self.segments:
            self.rollouts.setdefault(segment.rollout_id, []).append(segment)
        self.advantages, counted = self._advantages(algo)
        if algo.advantage.whiten if algo.advantage.whiten is not None else algo.advantage.estimator.startswith("reinforce"):
            self._whiten(counted)
        self.weights = {row.segment_id: self._gate(row, algo) for row in self.rows}
        loss = self._loss(algo)
        self.model.zero_grad()
        if loss.requires_grad:
            loss.backward()
        self.loss = float(loss.detach())
        self.gradient = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return self

    def _reward(self, rollout: list[SegmentRow], algo: AlgoSettings) -> float | None:
        """Clip, factor where a limit ended it, overlong penalty."""
        reward, shape = rollout[0].reward, algo.reward
        if reward is None:
            return None
        if shape.clip is not None:
            reward = min(max(reward, shape.clip[0]), shape.clip[1])
        if shape.stop_properly_penalty is not None and rollout[0].is_truncated and reward > 0:
            reward *= shape.stop_properly_penalty
        if shape.overlong_buffer:
            over = max(segment.n_tokens for segment in rollout) - (self.config.data.max_len - shape.overlong_buffer)
            reward -= shape.overlong_penalty * min(max(over / shape.overlong_buffer, 0), 1)
        return reward

    def _estimate(self, reward: float, group: list[float], batch: list[float], name: str) -> float:
        """What a rollout is paid. group, batch: scored rewards of its group and of all."""
        n, mean = len(group), sum(group) / len(group)
        match name:
            case "reinforce":
                return reward
            case "flash_reinforce":
                return reward - sum(batch) / len(batch)
            case "rloo":
                return reward - (sum(group) - reward) / (n - 1) if n > 1 else 0.0
            case "grpo":
                return (reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / (n - 1)) + 1e-6) if n > 1 else 0.0
        return reward - mean  # reinforce_baseline, dr_grpo

    def _advantages(self, algo: AlgoSettings) -> tuple[Column, dict[str, list[bool]]]:
        """Before whitening, and which tokens count."""
        name, gamma, kl = algo.advantage.estimator, algo.advantage.gamma, algo.kl
        rewards = {rollout_id: self._reward(rollout, algo) for rollout_id, rollout in self.rollouts.items()}
        scored = [reward for reward in rewards.values() if reward is not None]
        found: Column = {segment.segment_id: [0.0] * segment.n_sampled for segment in self.segments}
        counted = {segment.segment_id: [False] * segment.n_sampled for segment in self.segments}
        for rollout_id, rollout in self.rollouts.items():
            line = [(s.segment_id, i) for s in rollout for i in range(s.n_sampled) if self.trains[s.segment_id][i]]
            reward = rewards[rollout_id]
            group = [r for other, r in rewards.items() if other.split("/")[0] == rollout[0].group_id and r is not None]
            later, is_last = 0.0, True
            for segment_id, i in reversed(line):
                if name == "on_policy_distill":
                    found[segment_id][i] = self.frozen[segment_id][i] - self.old[segment_id][i]
                elif reward is not None:
                    penalty = kl.coef * self._kl(segment_id, i, kl.estimator) if kl.use == "reward" and kl.coef else 0.0
                    later = gamma * later - penalty + (self._estimate(reward, group, scored, name) if is_last else 0.0)
                    found[segment_id][i] = later
                counted[segment_id][i] = reward is not None or name == "on_policy_distill"
                is_last = False
        return found, counted

    def _kl(self, segment_id: str, i: int, kind: str) -> float:
        d = self.old[segment_id][i] - self.frozen[segment_id][i]
        return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]

    def _whiten(self, counted: dict[str, list[bool]]) -> None:
        values = [a for name, column in self.advantages.items() for a, counts in zip(column, counted[name], strict=True) if counts]
        mean = sum(values) / max(len(values), 1)
        deviation = math.sqrt(max(sum((a - mean) ** 2 for a in values) / max(len(values), 1), 1e-8))
        for name, column in self.advantages.items():
            self.advantages[name] = [(a - mean) / deviation if c else 0.0 for a, c in zip(column, counted[name], strict=True)]

    def _gate(self, row: Row, algo: AlgoSettings) -> list[float]:
        """Weight of each sampled token, 0 where it is rejected or may not train."""
        settings, trains = algo.advantage, self.trains[row.segment_id]
        if settings.is_correction_level == "off":
            return [1.0 if t else 0.0 for t in trains]
        bands, parts = [settings.is_correction_threshold], [trains]
        if settings.decoupled:
            is_current = (row.policy_versions[row.is_sampled] == VERSION).tolist()
            bands = [settings.is_mismatch_threshold, settings.is_correction_threshold]
            parts = [
                [t and c for t, c in zip(trains, is_current, strict=True)],
                [t and not c for t, c in zip(trains, is_current, strict=True)],
            ]
        weights = [1.0 if t else 0.0 for t in trains]
        for band, part in zip(bands, parts, strict=True):
            factors = self._factors(row, algo, part, band)
            weights = [w * f for w, f in zip(weights, factors, strict=True)]
        return weights

    def _factors(self, row: Row, algo: AlgoSettings, part: list[bool], band: tuple[float | None, float | None]) -> list[float]:
        settings = algo.advantage
        low, high = (0.0 if band[0] is None else band[0]), (math.inf if band[1] is None else band[1])
        engine = row.behaviour_logprobs[row.is_sampled].astype(float).tolist()
        pairs = list(zip(self.old[row.segment_id], engine, part, strict=True))
        own = [math.exp(now - then) if p else 1.0 for now, then, p in pairs]
        measure = own
        if settings.gate == "tv":
            measure = [abs(math.exp(now) - math.exp(then)) if p else 0.0 for now, then, p in pairs]
        if settings.gate == "kl":
            measure = [_binary_kl(math.exp(then), math.exp(now)) if p else 0.0 for now, then, p in pairs]
        if settings.is_correction_level != "token":
            inside = [m for m, p in zip(measure, part, strict=True) if p]
            if settings.gate != "ratio":
                whole = sum(inside) / max(len(inside), 1)
            else:
                power = 1.0 if settings.is_correction_level == "seq" else 1 / max(len(inside), 1)
                whole = math.exp(power * sum(math.log(m) for m in inside))
            measure = [whole] * len(measure)
        if settings.is_correction_mode == "mask":
            carried = own if settings.gate != "ratio" or settings.is_correction_level == "geo" else measure
            return [w if low <= m <= high else 0.0 for w, m in zip(carried, measure, strict=True)]
        return [min(max(m, low if settings.is_correction_mode == "clip" else 0.0), high) for m in measure]

    def _scale(self, segment: SegmentRow, aggregation: str) -> float:
        """Weight of a token in the loss, before any is rejected."""
        if aggregation == "token-mean":
            return 1 / sum(s.n_sampled for s in self.segments)
        key = (lambda s: s.rollout_id) if aggregation == "seq-mean-token-mean" else (lambda s: s.group_id)
        counts: dict[str, int] = {}
        for s in self.segments:
            counts[key(s)] = counts.get(key(s), 0) + s.n_sampled
        return 1 / (counts[key(segment)] * sum(count > 0 for count in counts.values()))

    def _loss(self, algo: AlgoSettings) -> torch.Tensor:
        """At step start every ratio is 1: ppo and gspo are -A r, cispo -A log p; no clip is active."""
        loss = torch.zeros((), dtype=torch.float64)
        for segment in self.segments:
            name = segment.segment_id
            for i in range(segment.n_sampled):
                if not self.trains[name][i]:
                    continue
                logp, entropy = self.now[name][0][i], self.now[name][1][i]
                ratio = torch.exp(logp - self.old[name][i])
                token = -self.advantages[name][i] * (logp if algo.loss.name == "cispo" else ratio)
                if algo.kl.coef and algo.kl.use == "loss":
                    d = self.old[name][i] - self.frozen[name][i]
                    token = token + algo.kl.coef * (self._kl(name, i, algo.kl.estimator) + d * (logp - self.old[name][i]))
                loss = loss + self._scale(segment, algo.loss.aggregation) * (
                    self.weights[name][i] * token - algo.loss.entropy_coef * entropy
                )
        return loss


def _binary_kl(p: float, q: float) -> float:
    """Of "this token" and "any other"; 0 where rounding makes it less."""
    return max(p * math.log(p / q) + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0), 0.0)
