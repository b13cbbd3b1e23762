"""Sums of one step: they add over micro-batches and ranks, and are divided once, at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from molt.admission.plan import StepPlan
from molt.algo.correction import Gate
from molt.errors import NonFiniteError
from molt.learn.policy import Update
from molt.learn.result import Refusal, SegmentUse, StepResult
from molt.learn.routes import RouteCounts, add_counts, route_metrics
from molt.learn.rows import MicroBatch


@dataclass(slots=True)
class Sums:
    """One rank's sums over its sampled tokens, float64."""

    losses: list[float] = field(default_factory=list)
    """Float32 loss of each micro-batch, in order."""
    n_sampled: int = 0
    n_trainable: int = 0
    n_kept: int = 0
    entropy: float = 0.0
    mismatch_k3: float = 0.0
    """Sum of e^r - 1 - r with r = log p_trainer - log p_engine, over trainable tokens: KL(engine || trainer)."""
    mismatch_abs: float = 0.0
    """Sum of |r|."""
    mismatch_max: float = 0.0
    n_equal: int = 0
    """Trainable tokens whose two log-probs agree bit for bit."""
    weight: float = 0.0
    """Sum of gate weights."""
    weight_square: float = 0.0
    loss_sums: dict[str, float] = field(default_factory=dict)
    value_sums: dict[str, float] = field(default_factory=dict)
    """Of the critic; empty without one."""
    routes: list[RouteCounts] = field(default_factory=list)
    """By layer with experts; empty without routing replay."""
    reference_kl: float = 0.0
    """Sum of the divergence from the reference over trainable tokens, at step start."""

    noted: list[tuple[Gate, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = field(default_factory=list)
    """Micro-batches that are not counted yet: their numbers may still be under way on a GPU."""

    def note(self, gate: Gate, entropy_N: torch.Tensor, is_trainable_N: torch.Tensor, loss_sums: dict[str, torch.Tensor]) -> None:
        """Keep one micro-batch to be counted; waits for nothing."""
        self.noted.append((gate, entropy_N, is_trainable_N, loss_sums))

    def add_noted(self) -> None:
        """Count what was noted, in order."""
        for gate, entropy_N, is_trainable_N, loss_sums in self.noted:
            self.add(gate, entropy_N.cpu(), is_trainable_N, {name: value.cpu() for name, value in loss_sums.items()})
        self.noted = []

    def add(self, gate: Gate, entropy_N: torch.Tensor, is_trainable_N: torch.Tensor, loss_sums: dict[str, torch.Tensor]) -> None:
        """Count one micro-batch."""
        ratio = gate.log_ratio_T[is_trainable_N].double()
        weights = gate.weights_T.double()
        self.n_sampled += len(entropy_N)
        self.n_trainable += int(is_trainable_N.sum())
        self.n_kept += int(gate.is_kept_T.sum())
        self.entropy += float(entropy_N.double().sum())
        known = ratio[torch.isfinite(ratio)]
        self.mismatch_k3 += float((torch.expm1(known.clamp(max=20.0)) - known).sum())
        self.mismatch_abs += float(known.abs().sum())
        self.mismatch_max = max(self.mismatch_max, float(known.abs().max()) if len(known) else 0.0)
        self.n_equal += int((ratio == 0).sum())
        self.weight += float(weights.sum())
        self.weight_square += float((weights * weights).sum())
        for name, value in loss_sums.items():
            self.loss_sums[name] = self.loss_sums.get(name, 0.0) + float(value)


def total(parts: Sequence[Sums]) -> Sums:
    """The sums of all ranks, added in rank order."""
    whole = Sums()
    for part in parts:
        whole.losses += part.losses
        for name in (
            "n_sampled",
            "n_trainable",
            "n_kept",
            "entropy",
            "mismatch_k3",
            "mismatch_abs",
            "n_equal",
            "weight",
            "weight_square",
            "reference_kl",
        ):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.mismatch_max = max(whole.mismatch_max, part.mismatch_max)
        whole.routes = add_counts([whole.routes, part.routes]) if whole.routes else part.routes
        for mine, theirs in ((whole.loss_sums, part.loss_sums), (whole.value_sums, part.value_sums)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value
    return whole


def check_finite(plan: StepPlan, batch: MicroBatch, logprobs_N: torch.Tensor) -> None:
    """NonFiniteError that names segment and token when the trainer's log-prob of a trainable token is not finite."""
    bad_N = batch.is_trainable_N & ~torch.isfinite(logprobs_N)
    if bool(bad_N.any()):
        place = int(bad_N.nonzero()[0])
        row = int(batch.packed.row_N[place])
        offset = place - int((batch.packed.row_N < row).sum())
        segment = plan.segments[batch.places[row]].segment_id
        raise NonFiniteError(
            f"trainer log-prob of sampled token {offset} of segment {segment} is {float(logprobs_N[place])} at step {plan.step}; "
            "the step is refused"
        )


def kept(batches: Sequence[MicroBatch], gates: Sequence[Gate]) -> list[tuple[int, int, int, int]]:
    """(place, micro-batch, position, kept tokens) of each segment of one rank."""
    return [
        (place, number, position, int(gate.n_kept_S[position]))
        for number, (batch, gate) in enumerate(zip(batches, gates, strict=True))
        for position, place in enumerate(batch.places)
    ]


def peak_memory(device: torch.device) -> dict[str, float]:
    """Most memory of a GPU that this process had in use, and that it held, since it began (GiB); nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "max_memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "max_memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def fullest(peaks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the rank that has most, by name."""
    return {name: max(peak[name] for peak in peaks) for name in peaks[0]}


def uses(plan: StepPlan, parts: Sequence[Sequence[tuple[int, int, int, int]]]) -> tuple[SegmentUse, ...]:
    """What each segment was used for, in plan order. parts: kept() of every rank."""
    found = [
        SegmentUse(
            segment_id=plan.segments[place].segment_id,
            place=place,
            rank=rank,
            micro_batch=number,
            position=position,
            n_sampled=plan.segments[place].n_sampled,
            n_kept=n_kept,
        )
        for rank, part in enumerate(parts)
        for place, number, position, n_kept in part
    ]
    return tuple(sorted(found, key=lambda use: use.place))


def result(
    plan: StepPlan,
    sums: Sums,
    *,
    update: Update | None,
    refusal: Refusal | None,
    digests: tuple[str, str],
    weights_digest: str | None,
    metrics: dict[str, float],
    uses: tuple[SegmentUse, ...],
    train_s: float,
    log_s: float,
) -> StepResult:
    """The step as the driver and the log see it."""
    return StepResult(
        step=plan.step,
        policy_version=plan.policy_version,
        loss=math.fsum(np.float32(loss) for loss in sums.losses),
        grad_norm=update.grad_norm if update else math.nan,
        learning_rate=update.learning_rate if update else 0.0,
        n_sampled=plan.n_sampled,
        n_kept=sums.n_kept,
        reward_mean=reward_mean(plan),
        kl_mean=_mean(sums.mismatch_k3, sums.n_trainable),
        entropy_mean=_mean(sums.entropy, sums.n_sampled),
        batch_digest=digests[0],
        loss_digest=digests[1],
        weights_digest=weights_digest,
        metrics=_finite(metrics | _ratios(sums)),
        train_s=train_s,
        log_s=log_s,
        uses=uses,
        refused=refusal,
    )


def refused(plan: StepPlan, refusal: Refusal, *, train_s: float, log_s: float) -> StepResult:
    """A step that ended before any forward pass counted."""
    return StepResult(
        step=plan.step,
        policy_version=plan.policy_version,
        loss=math.nan,
        grad_norm=math.nan,
        learning_rate=0.0,
        n_sampled=plan.n_sampled,
        n_kept=0,
        reward_mean=reward_mean(plan),
        kl_mean=None,
        entropy_mean=None,
        batch_digest="",
        loss_digest="",
        weights_digest=None,
        train_s=train_s,
        log_s=log_s,
        refused=refusal,
    )


def reward_mean(plan: StepPlan) -> float | None:
    """Mean reward over scored rollouts, each once however many segments it has."""
    rewards = {row.rollout_id: row.reward for row in plan.segments if row.reward is not None}
    return math.fsum(rewards.values()) / len(rewards) if rewards else None


def _ratios(sums: Sums) -> dict[str, float]:
    """Quotients of the sums, by name."""
    n_live = sums.loss_sums.get("n_live", 0.0)
    return {
        "n_trainable": float(sums.n_trainable),
        "kept_share": _mean(sums.n_kept, sums.n_trainable) or 0.0,
        "mismatch_abs_mean": _mean(sums.mismatch_abs, sums.n_trainable) or 0.0,
        "mismatch_abs_max": sums.mismatch_max,
        "bitwise_equal_share": _mean(sums.n_equal, sums.n_trainable) or 0.0,
        "effective_sample_share": sums.weight**2 / (sums.weight_square * sums.n_kept) if sums.n_kept and sums.weight_square else 0.0,
        "clipped_share": _mean(sums.loss_sums.get("n_clipped", 0.0), n_live) or 0.0,
        "policy_kl_mean": _mean(sums.loss_sums.get("kl", 0.0), n_live) or 0.0,
        **({"reference_kl_mean": sums.reference_kl / sums.n_trainable} if sums.reference_kl and sums.n_trainable else {}),
        **(route_metrics(sums.routes) if sums.routes else {}),
        **_critic(sums.value_sums),
    }


def _critic(sums: dict[str, float]) -> dict[str, float]:
    """Loss of the critic, and the share of the returns' variance that its values explain."""
    count = sums.get("n_tokens", 0.0)
    if not count:
        return {}
    variance = sums["return_square"] / count - (sums["return"] / count) ** 2
    error = sums["squared_error"] / count
    return {
        "critic_loss": sums["loss"],
        "critic_clipped_share": sums["n_clipped"] / count,
        "explained_variance": 1 - error / variance if variance > 0 else math.nan,
    }


def _mean(value: float, count: float) -> float | None:
    """Quotient, None over nothing."""
    return value / count if count else None


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """Numbers that JSON can hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
