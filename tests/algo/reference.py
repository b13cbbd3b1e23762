"""The algorithms once more, in plain numpy float64 loops written from the formulas: the oracle of these tests.

Rollouts are dicts: group, reward (None = unscorable), segments = list of token counts. Nothing here imports molt.
"""

from __future__ import annotations

import math

import numpy as np


def scored(rollouts, group):
    return [r["reward"] for r in rollouts if r["group"] == group and r["reward"] is not None]


def outcome_value(name, rollouts):
    """The undiscounted number that each rollout is paid."""
    every = [r["reward"] for r in rollouts if r["reward"] is not None]
    values = []
    for rollout in rollouts:
        x, members = rollout["reward"], scored(rollouts, rollout["group"])
        if x is None:
            values.append(0.0)
        elif name == "reinforce":
            values.append(x)
        elif name == "flash_reinforce":
            values.append(0.0 if len(set(every)) == 1 else x - sum(every) / len(every))
        elif len(set(members)) == 1:
            values.append(0.0)
        elif name == "rloo":
            values.append(x - (sum(members) - x) / (len(members) - 1))
        elif name == "grpo":
            mean = sum(members) / len(members)
            std = math.sqrt(sum((m - mean) ** 2 for m in members) / (len(members) - 1))
            values.append((x - mean) / (std + 1e-6))
        else:
            values.append(x - sum(members) / len(members))
    return values


def tokens_of(rollouts):
    """(rollout, time) of each sampled token, segment after segment, and the length of each rollout."""
    return [(r, t) for r, rollout in enumerate(rollouts) for t in range(sum(rollout["segments"]))]


def advantages(name, rollouts, *, gamma=1.0, lambd=1.0, penalty=None, values=None, whiten=None):
    """Per-token advantages; rollouts lie one after another. penalty and values are lists per rollout."""
    if whiten is None:
        whiten = name in ("reinforce", "reinforce_baseline", "gae")
    paid = [r["reward"] or 0.0 for r in rollouts] if name == "gae" else outcome_value(name, rollouts)
    result = []
    for r, rollout in enumerate(rollouts):
        n = sum(rollout["segments"])
        reward = np.zeros(n)
        if penalty is not None:
            reward += np.asarray(penalty[r])
        if n:
            reward[n - 1] += paid[r]
        row, ahead = np.zeros(n), 0.0
        for t in reversed(range(n)):
            if name == "gae":
                following = values[r][t + 1] if t + 1 < n else 0.0
                ahead = reward[t] + gamma * following - values[r][t] + gamma * lambd * ahead
            else:
                ahead = reward[t] + gamma * ahead
            row[t] = ahead
        result.append(row)
    counted = [rollout["reward"] is not None for rollout in rollouts]
    if whiten:
        seen = np.concatenate([row for row, is_counted in zip(result, counted, strict=True) if is_counted] or [np.zeros(0)])
        if len(seen) == 0 or seen.max() == seen.min():
            result = [np.zeros_like(row) for row in result]
        else:
            mean, variance = seen.mean(), seen.var()
            result = [(row - mean) / math.sqrt(max(variance, 1e-8)) for row in result]
    return np.concatenate([row if is_counted else np.zeros_like(row) for row, is_counted in zip(result, counted, strict=True)])


def binary(kind, p, q):
    """Divergence of Bernoulli(p) from Bernoulli(q)."""
    if kind == "tv":
        return abs(p - q)
    total = p * math.log(p / q)
    return total + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


def gate(trainer, behaviour, segments, level, mode, low, high, kind="ratio"):
    """(weight, kept) of each token; segments is the token count of each."""
    weights, kept, start = [], [], 0
    for n in segments:
        d = [trainer[start + i] - behaviour[start + i] for i in range(n)]
        measure = d if kind == "ratio" else [binary(kind, math.exp(behaviour[start + i]), math.exp(trainer[start + i])) for i in range(n)]
        for i in range(n):
            of_segment = sum(measure) if kind == "ratio" else sum(measure) / n
            at_level = {"token": measure[i], "seq": of_segment, "geo": sum(measure) / n}[level]
            compared = math.exp(at_level) if kind == "ratio" else at_level
            if mode == "mask":
                inside = (low is None or compared >= low) and (high is None or compared <= high)
                own = math.exp(d[i])
                weight = own if kind != "ratio" or level in ("token", "geo") else math.exp(sum(d))
                weights.append(weight if inside else 0.0)
                kept.append(inside)
            else:
                bounded = min(compared, high) if high is not None else compared
                if mode == "clip" and low is not None:
                    bounded = max(bounded, low)
                weights.append(bounded)
                kept.append(True)
        start += n
    return np.array(weights), np.array(kept)


def token_loss(name, logp, old, advantage, low, high, dual=None, segments=None):
    """Surrogate of each token; gspo takes the token counts of the segments."""
    log_ratio = [a - b for a, b in zip(logp, old, strict=True)]
    if name == "gspo":
        start = 0
        for n in segments:
            mean = sum(log_ratio[start : start + n]) / max(n, 1)
            log_ratio[start : start + n] = [mean] * n
            start += n
    losses = []
    for lp, d, a in zip(logp, log_ratio, advantage, strict=True):
        ratio = math.exp(d)
        clipped = min(max(ratio, 1 - low), 1 + high)
        if name == "cispo":
            losses.append(-clipped * a * lp)
            continue
        value = max(-a * ratio, -a * clipped)
        if dual is not None and a < 0:
            value = min(value, -a * dual)
        losses.append(value)
    return np.array(losses)


def scale(aggregation, rollouts):
    """Weight of each token."""
    result = []
    total = sum(sum(r["segments"]) for r in rollouts)
    for rollout in rollouts:
        n = sum(rollout["segments"])
        if aggregation == "token-mean":
            weight = 1 / total if total else 0
        elif aggregation == "seq-mean-token-mean":
            weight = 1 / n / sum(1 for r in rollouts if sum(r["segments"])) if n else 0
        else:
            groups = {r["group"] for r in rollouts if sum(r["segments"])}
            in_group = sum(sum(r["segments"]) for r in rollouts if r["group"] == rollout["group"])
            weight = 1 / in_group / len(groups) if n else 0
        result.extend([weight] * n)
    return np.array(result)
