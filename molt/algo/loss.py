"""Policy losses by name, and the per-token scale that turns any cut of a batch into the same sum.

loss = sum over tokens of scale * weight * surrogate. The scale is made once from the whole batch, before rejection, so
micro-batches and ranks simply add: no mean of means, and a rejected token lowers the sum, never the denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molt.algo.batch import RaggedBatch, sum_by_segment
from molt.algo.kl import MAX_LOG_RATIO
from molt.errors import SettingError

if TYPE_CHECKING:
    from molt.config import AlgoSettings, LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Loss of one micro-batch, and sums that add over micro-batches and ranks."""

    loss: Tensor
    """float32 scalar with gradient; 0 with a zero gradient when no token is live."""
    metrics: dict[str, Tensor]
    """float64 scalars without gradient, all sums over live tokens: n_live, n_clipped, n_bounded (log-ratio beyond +-20),
    n_non_finite, ratio, kl (k3 to the step start)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """What a surrogate sees. Dead tokens hold zeros, so that nothing of them reaches value or gradient."""

    logprobs_T: Tensor
    log_ratio_T: Tensor
    """log p_now - log p_old, bounded to +-20; with gradient."""
    advantages_T: Tensor
    live_T: Tensor
    trainable_T: Tensor
    segment_T: Tensor | None


Surrogate = Callable[[_Tokens, "LossSettings"], tuple[Tensor, Tensor]]
"""(tokens, config.algo.loss) -> (token loss, whether its clip is active), both on T."""
_LOSSES: dict[str, Surrogate] = {}


def loss(name: str) -> Callable[[Surrogate], Surrogate]:
    """Register a surrogate under a name."""

    def register(function: Surrogate) -> Surrogate:
        _LOSSES[name] = function
        return function

    return register


def loss_names() -> list[str]:
    """Names of all registered losses, sorted."""
    return sorted(_LOSSES)


def token_scale(aggregation: str, batch: RaggedBatch) -> Tensor:
    """Weight of each sampled token of the whole batch in the loss, float32; sums to 1 when every token is trainable. # (T,)

    token-mean: 1 / sampled tokens. seq-mean-token-mean: mean over the tokens of a rollout (all its segments together), then
    over rollouts with sampled tokens. prompt-mean-token-mean: mean over the tokens of a group, then over groups with sampled
    tokens. Tokens that may not train get 0 and still count in the denominator.
    """
    if aggregation == "token-mean":
        scale_T = torch.full((batch.num_tokens,), 1.0 / max(batch.num_tokens, 1), dtype=torch.float64)
    elif aggregation in ("seq-mean-token-mean", "prompt-mean-token-mean"):
        place_T = batch.rollout_T if aggregation == "seq-mean-token-mean" else batch.group_R[batch.rollout_T]
        count_P = torch.bincount(place_T)
        scale_T = 1.0 / (count_P.clamp(min=1).double() * (count_P > 0).sum())[place_T]
    else:
        raise SettingError(
            f"algo.loss.aggregation={aggregation} is unknown; known are token-mean, seq-mean-token-mean and prompt-mean-token-mean"
        )
    return torch.where(batch.trainable_T(), scale_T, 0.0).float()


def policy_loss(
    name: str,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    scale_T: Tensor,
    settings: AlgoSettings,
    *,
    segment_T: Tensor | None = None,
) -> LossOutput:
    """Policy loss over any subset of tokens (whole segments for gspo, which needs segment_T); settings is config.algo.

    old_logprobs_T are the trainer's at step start, weights_T the gate's. A token of scale 0 or weight 0 is dead: its value
    and gradient are exactly 0 whatever its log-probs hold. A live NaN goes through to the loss, for the step to be refused.
    """
    if name not in _LOSSES:
        raise SettingError(f"algo.loss.name={name} is unknown; known are {', '.join(loss_names())}")
    trainable_T = scale_T != 0
    live_T = trainable_T & (weights_T != 0)
    now_T = torch.where(trainable_T, logprobs_T, 0.0)
    raw_T = torch.where(trainable_T, now_T - torch.where(trainable_T, old_logprobs_T, 0.0), 0.0)
    tokens = _Tokens(
        logprobs_T=now_T,
        log_ratio_T=raw_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages_T=torch.where(live_T, advantages_T, 0.0),
        live_T=live_T,
        trainable_T=trainable_T,
        segment_T=segment_T,
    )
    token_T, clipped_T = _LOSSES[name](tokens, settings.loss)
    factor_T = torch.where(live_T, scale_T * weights_T, 0.0)
    value = torch.where(live_T, factor_T * token_T, 0.0).sum()
    ratio_T = tokens.log_ratio_T.detach().double()
    sums = {
        "n_non_finite": live_T & ~torch.isfinite(token_T.detach()),
        "n_live": live_T,
        "n_clipped": live_T & clipped_T,
        "n_bounded": live_T & (raw_T.detach().abs() > MAX_LOG_RATIO),
        "ratio": torch.where(live_T, ratio_T.exp(), 0.0),
        "kl": torch.where(live_T, torch.expm1(ratio_T) - ratio_T, 0.0),
    }
    return LossOutput(loss=value, metrics={key: column.double().sum() for key, column in sums.items()})


def entropy_loss(entropy_T: Tensor, scale_T: Tensor, coefficient: float) -> Tensor:
    """-coefficient * sum(scale * entropy): a bonus for entropy. A token of scale 0 has no gradient."""
    live_T = scale_T != 0
    return -coefficient * torch.where(live_T, scale_T * torch.where(live_T, entropy_T, 0.0), 0.0).sum()


@loss("ppo")
def _ppo(tokens: _Tokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); dual clip bounds it by -A c where A < 0 (arXiv 1707.06347, 1912.09729)."""
    ratio_T = tokens.log_ratio_T.exp()
    plain_T = -tokens.advantages_T * ratio_T
    bounded_T = -tokens.advantages_T * ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    clipped_T = bounded_T > plain_T
    loss_T = torch.maximum(plain_T, bounded_T)
    if settings.dual_clip is not None:
        ceiling_T = -tokens.advantages_T * settings.dual_clip
        is_high_T = (tokens.advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(is_high_T, ceiling_T, loss_T)
        clipped_T = clipped_T | is_high_T
    return loss_T, clipped_T


@loss("cispo")
def _cispo(tokens: _Tokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped, no token loses its gradient (arXiv 2506.13585)."""
    ratio_T = tokens.log_ratio_T.detach().exp()
    bounded_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -bounded_T * tokens.advantages_T * tokens.logprobs_T, bounded_T != ratio_T


@loss("gspo")
def _gspo(tokens: _Tokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """ppo on the geometric mean of a segment's ratios, token form (arXiv 2507.18071, GSPO-token).

    Value: s = exp(mean log-ratio over the segment's trainable tokens); gradient: s * grad log p of the token itself, so that a
    rejected token has none. The published clip is 3e-4 below and 4e-4 above.
    """
    if tokens.segment_T is None:
        raise SettingError("algo.loss.name=gspo needs the segment of every token (segment_T)")
    num_segments = int(tokens.segment_T.max()) + 1 if len(tokens.segment_T) else 0
    total_S = sum_by_segment(tokens.log_ratio_T.detach(), tokens.segment_T, num_segments)
    count_S = sum_by_segment(tokens.trainable_T, tokens.segment_T, num_segments)
    mean_T = (total_S / count_S.clamp(min=1))[tokens.segment_T].to(tokens.log_ratio_T.dtype)
    score_T = tokens.logprobs_T - tokens.logprobs_T.detach()
    return _ppo(replace(tokens, log_ratio_T=mean_T + score_T), settings)
