"""What the device programs read out of a run's log: steps, refits, rewards with intervals, the share of tokens that trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Bodies of all events of a kind, in order; empty when there is no log yet."""
    from molt.errors import MoltError
    from molt.log.reader import LogReader

    try:
        table = LogReader.open(run_dir).cut().table("events", ["lsn", "body"], where=f"kind = '{kind}'").sort_by("lsn")
    except (MoltError, OSError):
        return []
    return [json.loads(body) for body in table.column("body").to_pylist()]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """What each step was, without its digests."""
    keys = ("step", "reward_mean", "loss", "grad_norm", "kl_mean", "entropy_mean", "n_sampled", "n_kept", "train_s", "log_s", "wait_s")
    return [{key: body[key] for key in keys} for body in events_of(run_dir, "step_trained")]


def refits_of(run_dir: Path) -> list[dict[str, Any]]:
    """Phases of each refit."""
    keys = ("policy_version", "pause_s", "transfer_s", "verify_s", "resume_s", "size_bytes", "num_in_flight")
    return [{key: body[key] for key in keys} for body in events_of(run_dir, "weights_refit")]


def rewards_of(run_dir: Path) -> list[list[float]]:
    """Rewards of the rollouts of each trained step, in order of steps, one for each rollout."""
    from molt.log.reader import LogReader

    cut = LogReader.open(run_dir).cut()
    used = cut.table("consumption", ["step", "rollout_id"])
    rewards = cut.table("segments", ["rollout_id", "reward"], where="segment_index = 0")
    of = dict(zip(rewards.column("rollout_id").to_pylist(), rewards.column("reward").to_pylist(), strict=True))
    by_step: dict[int, dict[str, float]] = {}
    for step, rollout in zip(used.column("step").to_pylist(), used.column("rollout_id").to_pylist(), strict=True):
        if of.get(rollout) is not None:
            by_step.setdefault(step, {})[rollout] = float(of[rollout])
    return [list(by_step[step].values()) for step in sorted(by_step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The sampled tokens of one segment at the step that scored it."""

    step: int
    differences: np.ndarray
    """float64, nats: trainer minus engine."""
    is_same_version: bool
    """Sampled wholly by the version that scored it, so that only kernels differ."""


def scored(run_dir: Path) -> list[Scored]:
    """Every scored segment of a run, in stored order."""
    from molt.log.reader import LogReader

    cut = LogReader.open(run_dir).cut()
    segments = {row["segment_id"]: row for row in cut.table("segments", ["segment_id", "behaviour_logprobs", "spans"]).to_pylist()}
    found = []
    for score in cut.table("scores", ["step", "segment_id", "policy_version", "trainer_logprobs"]).to_pylist():
        row = segments[score["segment_id"]]
        sampled = np.repeat([span["source"] == "policy" for span in row["spans"]], [span["len"] for span in row["spans"]])
        behaviour = np.array(row["behaviour_logprobs"], dtype=np.float64)[sampled]
        versions = {span["policy_version"] for span in row["spans"] if span["source"] == "policy"}
        found.append(
            Scored(
                step=score["step"],
                differences=np.array(score["trainer_logprobs"], dtype=np.float64) - behaviour,
                is_same_version=versions == {score["policy_version"]},
            )
        )
    return found


def geo_shares(run_dir: Path, low: float, high: float) -> dict[str, float]:
    """Share of sampled tokens in segments whose geometric mean ratio of trainer to engine lies in a band: of all that trained, and of
    those sampled wholly by the version that trained."""
    kept, every = {"all": 0, "same_version": 0}, {"all": 0, "same_version": 0}
    for segment in scored(run_dir):
        count, mean = len(segment.differences), float(segment.differences.mean())
        for name in ("all", *(("same_version",) if segment.is_same_version else ())):
            every[name] += count
            kept[name] += count * (math.log(low) <= mean <= math.log(high))
    return {name: kept[name] / max(1, every[name]) for name in every}


def gaps(run_dir: Path) -> dict[str, Any]:
    """|trainer - engine| per trained token, nats: over the whole run, and its mean by step."""
    by_step: dict[int, list[np.ndarray]] = {}
    for segment in scored(run_dir):
        by_step.setdefault(segment.step, []).append(np.abs(segment.differences))
    steps = [np.concatenate(by_step[step]) for step in sorted(by_step)]
    every = np.concatenate(steps)
    whole = {"mean": float(every.mean()), "p99": float(np.quantile(every, 0.99)), "max": float(every.max()), "num_tokens": len(every)}
    return {"gap": whole, "gap_by_step": [float(step.mean()) for step in steps]}


def lag_of(run_dir: Path) -> float:
    """Mean lag of the consumed segments, in versions."""
    from molt.log.reader import LogReader

    lags = LogReader.open(run_dir).cut().table("consumption", ["lag"]).column("lag").drop_null().to_pylist()
    return math.fsum(lags) / max(1, len(lags))


def root_of(run_dir: Path) -> str | None:
    """Merkle root of the sealed log; None when it was not sealed."""
    for seal in run_dir.rglob("SEAL.json"):
        found = json.loads(seal.read_text())
        return found.get("root") or found.get("seal", {}).get("root")
    return None


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and the half width of its normal 95 % interval, from the sample deviation."""
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1)) if count > 1 else math.nan
    return {"mean": mean, "ci95": 1.96 * spread / math.sqrt(count) if count > 1 else math.nan, "num": count}
