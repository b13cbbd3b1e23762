"""The critic's loss: squared error to the returns, with the value clipped around its old one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Loss of one micro-batch, and sums over trainable tokens that add over micro-batches and ranks."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """float64 scalars: n_tokens, n_clipped, squared_error, and the sums that explained variance needs: return, return_square."""


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, scale_T: Tensor, *, clip: float | None) -> ValueLoss:
    """sum(scale * max((V - R)^2, (old + clip(V - old, -c, c) - R)^2) / 2) (PPO2); unclipped when clip is None.

    scale_T is token_scale's; a token of scale 0 has no gradient whatever it holds. Rejection by the importance gate does not
    reach the critic: its target is a return, not a surrogate.
    """
    live_T = scale_T != 0
    now_T = torch.where(live_T, values_T, 0.0)
    target_T = torch.where(live_T, returns_T, 0.0)
    error_T = (now_T - target_T).square()
    clipped_T = torch.zeros_like(live_T)
    largest_T = error_T
    if clip is not None:
        old_T = torch.where(live_T, old_values_T, 0.0)
        bounded_T = (old_T + (now_T - old_T).clamp(-clip, clip) - target_T).square()
        clipped_T = bounded_T > error_T
        largest_T = torch.maximum(error_T, bounded_T)
    sums = {
        "n_tokens": live_T,
        "n_clipped": clipped_T,
        "squared_error": error_T.detach(),
        "return": target_T,
        "return_square": target_T.double().square(),
    }
    value = (torch.where(live_T, scale_T, 0.0) * largest_T).sum() / 2
    return ValueLoss(loss=value, metrics={key: column.double().sum() for key, column in sums.items()})
