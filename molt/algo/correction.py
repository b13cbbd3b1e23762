"""Importance correction: which sampled tokens may train, and with what weight, from stored and fresh log-probs.

The log-ratio of a token is log p_trainer - log p_behaviour. The level says what is compared with the band:

    level  ratio compared                      mask keeps ratios inside;   clip, trunc: weight of every token
                                               weight of a kept token
    off    none                                1                           1
    token  its own                             its own ratio               its own ratio, bounded
    seq    product over the segment            the product                 the product, bounded
    geo    geometric mean over the segment     its own ratio               the geometric mean, bounded

mask: low <= ratio <= high keeps, else weight 0. clip: weight = min(max(ratio, low), high). trunc: weight = min(ratio, high).
gate = kl or tv compares a binary divergence instead (token: its own, seq: the mean over the segment) and only masks; a kept token
has its own ratio as weight. All ratios are formed in log space and bounded to e^-20 .. e^20.
Each segment is decided by itself, so the gate may run on any subset of whole segments and gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molt.algo.batch import sum_by_segment
from molt.algo.kl import MAX_LOG_RATIO
from molt.algo.rules import Band, band, check_correction, mismatch_band
from molt.errors import LineageError, NonFiniteError

if TYPE_CHECKING:
    from molt.config import AlgoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What the gate decided. Weights carry no gradient."""

    weights_T: Tensor
    """float32: multiplies the token loss; 0 where rejected or not trainable."""
    is_kept_T: Tensor
    """bool: trainable and not rejected."""
    n_tokens_S: Tensor
    """int64: sampled tokens."""
    n_kept_S: Tensor
    """int64: tokens with is_kept_T."""
    ratio_mean_S: Tensor
    """float64: mean bounded ratio over trainable tokens; NaN for none."""
    log_ratio_min_S: Tensor
    """float64, nats; NaN for none."""
    log_ratio_max_S: Tensor
    """float64, nats; NaN for none."""
    log_ratio_T: Tensor
    """float32: log p_trainer - log p_behaviour; 0 where not trainable."""
    band: Band
    """The band in force."""


def importance_gate(
    trainer_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    segment_T: Tensor,
    settings: AlgoSettings,
    *,
    num_segments: int | None = None,
    is_trainable_T: Tensor | None = None,
    version_T: Tensor | None = None,
    trainer_version: int | None = None,
) -> Gate:
    """Gate over whole segments; segment_T is non-decreasing, settings is config.algo.

    Errors: LineageError for a trainable token without behaviour log-prob (NaN), or for a segment of mixed versions under
    level off; NonFiniteError for any other log-prob that is not finite. Both name segment and token; nothing is cleaned away.
    decoupled needs version_T and trainer_version.
    """
    advantage = settings.advantage
    check_correction(advantage)
    if num_segments is None:
        num_segments = int(segment_T[-1]) + 1 if len(segment_T) else 0
    trainable_T = torch.ones_like(segment_T, dtype=torch.bool) if is_trainable_T is None else is_trainable_T
    trainer_T, behaviour_T = trainer_logprobs_T.detach(), behaviour_logprobs_T.detach()
    log_ratio_T = torch.where(trainable_T, trainer_T.double() - behaviour_T.double(), 0.0)
    if not bool(torch.isfinite(log_ratio_T).all()):
        _refuse(trainer_T, behaviour_T, segment_T, trainable_T)
    axes = _Segments(segment_T=segment_T, num_segments=num_segments, trainable_T=trainable_T)
    if advantage.is_correction_level == "off":
        _refuse_mixed(axes, version_T)
        weight_T, kept_T = torch.ones_like(log_ratio_T, dtype=torch.float64), trainable_T
    elif advantage.decoupled:
        weight_T, kept_T = _decoupled(axes, settings, trainer_T, behaviour_T, version_T, trainer_version)
    else:
        weight_T, kept_T = _decide(axes, settings, trainer_T, behaviour_T, trainable_T, band(advantage))
    kept_T = kept_T & trainable_T
    return _gate(axes, torch.where(kept_T, weight_T, 0.0).float(), kept_T, log_ratio_T, band(advantage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    segment_T: Tensor
    num_segments: int
    trainable_T: Tensor

    def total(self, values_T: Tensor) -> Tensor:
        """Sums by segment, float64. # (S,)"""
        return sum_by_segment(values_T, self.segment_T, self.num_segments)

    def count(self, is_counted_T: Tensor) -> Tensor:
        """Counts by segment, int64. # (S,)"""
        zeros_S = torch.zeros(self.num_segments, dtype=torch.int64, device=is_counted_T.device)
        return zeros_S.index_add_(0, self.segment_T, is_counted_T.long())

    def extreme(self, values_T: Tensor, how: str) -> Tensor:
        """amin or amax over trainable tokens by segment, NaN for none, float64. # (S,)"""
        start = torch.inf if how == "amin" else -torch.inf
        found_S = torch.full((self.num_segments,), start, dtype=torch.float64, device=values_T.device)
        found_S.scatter_reduce_(0, self.segment_T, torch.where(self.trainable_T, values_T.double(), start), how)
        return torch.where(torch.isinf(found_S), torch.nan, found_S)


def _refuse(trainer_T: Tensor, behaviour_T: Tensor, segment_T: Tensor, trainable_T: Tensor) -> None:
    for name, values_T in (("behaviour", behaviour_T), ("trainer", trainer_T)):
        bad_T = trainable_T & ~torch.isfinite(values_T)
        if not bool(bad_T.any()):
            continue
        place = int(bad_T.nonzero()[0])
        segment = int(segment_T[place])
        offset = place - int((segment_T < segment).sum())
        where = f"{name} log-prob of sampled token {offset} in segment {segment} of the batch is {float(values_T[place])}"
        if name == "behaviour" and bool(torch.isnan(values_T[place])):
            raise LineageError(f"{where}: unknown; the token may not be trained on")
        raise NonFiniteError(f"{where}; the step is refused")


def _refuse_mixed(axes: _Segments, version_T: Tensor | None) -> None:
    if version_T is None:
        return
    mixed_S = axes.extreme(version_T, "amin") < axes.extreme(version_T, "amax")
    if bool(mixed_S.any()):
        segment = int(mixed_S.nonzero()[0])
        raise LineageError(
            f"segment {segment} of the batch was sampled by several policy versions and algo.advantage.is_correction_level=off; "
            "set a level (token, seq or geo), or train.partial_rollout_enable=false"
        )


def _decide(
    axes: _Segments, settings: AlgoSettings, target_T: Tensor, source_T: Tensor, part_T: Tensor, bounds: Band
) -> tuple[Tensor, Tensor]:
    """Weight (float64) and kept flag of each token for one pair of policies that differ on the tokens of part_T.

    Elsewhere the log-ratio is 0, and every band holds the ratio 1. At level seq or geo the whole segment shares the outcome.
    """
    level, mode, gate = settings.advantage.is_correction_level, settings.advantage.is_correction_mode, settings.advantage.gate
    low, high = bounds
    own_T = torch.where(part_T, target_T.double() - source_T.double(), 0.0)
    if gate == "ratio":
        compared_T = _at_level(axes, own_T, part_T, level, is_mean=level == "geo")
        low = None if low is None else _log(low)
        high = None if high is None else _log(high)
    else:
        divergence_T = torch.where(part_T, binary_divergence(gate, target_T, source_T), 0.0)
        compared_T = _at_level(axes, divergence_T, part_T, level, is_mean=True)
    kept_T, weighed_T = torch.ones_like(part_T), compared_T
    if mode == "mask":
        if low is not None:
            kept_T = compared_T >= low
        if high is not None:
            kept_T = kept_T & (compared_T <= high)
        if gate != "ratio" or level == "geo":
            weighed_T = own_T
    else:
        weighed_T = weighed_T.clamp(min=low if mode == "clip" else None, max=high)
    return weighed_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), kept_T


def _at_level(axes: _Segments, values_T: Tensor, part_T: Tensor, level: str, *, is_mean: bool) -> Tensor:
    if level == "token":
        return values_T
    total_S = axes.total(values_T)
    if is_mean:
        total_S = total_S / axes.count(part_T).clamp(min=1)
    return total_S[axes.segment_T]


def _log(value: float) -> float:
    return float(torch.log(torch.tensor(value, dtype=torch.float64)))


def _decoupled(
    axes: _Segments,
    settings: AlgoSettings,
    trainer_T: Tensor,
    behaviour_T: Tensor,
    version_T: Tensor | None,
    trainer_version: int | None,
) -> tuple[Tensor, Tensor]:
    """Mismatch (engine to trainer at one version) and staleness (that version to the trainer now), each against its own band.

    A token of the current version is all mismatch, a stale one all staleness. The weights multiply, and a token is kept when both
    bands keep it.
    """
    if version_T is None or trainer_version is None:
        raise LineageError("algo.advantage.decoupled=true needs the policy version of every token and of the trainer; got none")
    current_T = axes.trainable_T & (version_T == trainer_version)
    stale_T = axes.trainable_T & ~current_T
    mismatch_T, fits_T = _decide(axes, settings, trainer_T, behaviour_T, current_T, mismatch_band(settings.advantage))
    staleness_T, fresh_T = _decide(axes, settings, trainer_T, behaviour_T, stale_T, band(settings.advantage))
    return mismatch_T * staleness_T, fits_T & fresh_T


def binary_divergence(kind: str, target_logprobs_T: Tensor, source_logprobs_T: Tensor) -> Tensor:
    """Divergence between "this token" and "any other" under two policies, float64, >= 0. # (T,)

    With p = source and q = target probability: tv = |p - q|; kl = p log(p/q) + (1-p) log((1-p)/(1-q)).
    It needs only the log-probs of the sampled token, and bounds the divergence over the vocabulary from below.
    """
    source_T, target_T = source_logprobs_T.double().clamp(max=0.0), target_logprobs_T.double().clamp(max=0.0)
    p_T, q_T = source_T.exp(), target_T.exp()
    if kind == "tv":
        return (p_T - q_T).abs()
    tiny = torch.finfo(torch.float64).tiny
    rest_p_T, rest_q_T = -torch.expm1(source_T), -torch.expm1(target_T)
    rest_T = torch.where(rest_p_T > 0, rest_p_T * (rest_p_T.clamp(min=tiny).log() - rest_q_T.clamp(min=tiny).log()), 0.0)
    return (p_T * (source_T - target_T) + rest_T).clamp(min=0.0)


def _gate(axes: _Segments, weights_T: Tensor, kept_T: Tensor, log_ratio_T: Tensor, bounds: Band) -> Gate:
    n_trainable_S = axes.count(axes.trainable_T)
    ratio_T = torch.where(axes.trainable_T, log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    return Gate(
        weights_T=weights_T,
        is_kept_T=kept_T,
        n_tokens_S=axes.count(torch.ones_like(axes.trainable_T)),
        n_kept_S=axes.count(kept_T),
        ratio_mean_S=torch.where(n_trainable_S > 0, axes.total(ratio_T) / n_trainable_S.clamp(min=1), torch.nan),
        log_ratio_min_S=axes.extreme(log_ratio_T, "amin"),
        log_ratio_max_S=axes.extreme(log_ratio_T, "amax"),
        log_ratio_T=log_ratio_T.float(),
        band=bounds,
    )
