"""Sampling one id per row from logits, with the log-prob of exactly the distribution that was sampled from.

Axes: B rows, V vocabulary. A row's randomness comes from its own uniform number, so neighbours never change its choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Parameters of B rows."""

    temperature_B: torch.Tensor
    """0 is greedy; its log-probs are those of temperature 1."""
    top_p_B: torch.Tensor
    top_k_B: torch.Tensor
    uniform_B: torch.Tensor
    """In [0, 1), float64."""
    is_masked: bool
    """Whether any row has top_p < 1 or top_k > 0."""


def processed_logprobs(logits_BV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Log-probs after temperature, top-k and top-p, renormalised over what survives; float32, -inf where cut."""
    scale_B = torch.where(rows.temperature_B > 0, rows.temperature_B, 1.0)
    scaled_BV = logits_BV.float() / scale_B[:, None]  # float32 before the division: a bf16 quotient would be rounded back
    if rows.is_masked:
        scaled_BV = _mask_top(scaled_BV, rows.top_p_B, rows.top_k_B)
    return torch.log_softmax(scaled_BV, dim=-1)


def _mask_top(scaled_BV: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor) -> torch.Tensor:
    """Cut to the k largest, then to the smallest set whose probability reaches p; ties with the last one kept by k stay."""
    vocab = scaled_BV.shape[-1]
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    k_B = torch.where(top_k_B > 0, top_k_B, vocab).clamp(max=vocab)
    kth_B1 = sorted_BV.gather(1, (k_B - 1)[:, None])
    sorted_BV = sorted_BV.masked_fill(sorted_BV < kth_B1, -torch.inf)
    probs_BV = sorted_BV.softmax(dim=-1)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV  # probability of all that are more likely
    is_cut_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1.0)
    is_cut_BV[:, 0] = False
    sorted_BV = sorted_BV.masked_fill(is_cut_BV, -torch.inf)
    return torch.empty_like(scaled_BV).scatter_(1, order_BV, sorted_BV)


def sample_ids(logits_BV: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """One id per row by inversion of the distribution function in vocabulary order, and its log-prob: (B) int64, (B) float32."""
    logprobs_BV = processed_logprobs(logits_BV, rows)
    cumulative_BV = logprobs_BV.double().exp_().cumsum_(dim=-1)
    # An id of probability 0 adds nothing to the sum, so the first place above the target is never one.
    total_B = cumulative_BV[:, -1]
    target_B1 = torch.minimum(rows.uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))[:, None]
    ids_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1).clamp_(max=logits_BV.shape[-1] - 1)
    ids_B = torch.where(rows.temperature_B > 0, ids_B, logits_BV.argmax(dim=-1))
    return ids_B, logprobs_BV.gather(1, ids_B[:, None]).squeeze(1)


def uniforms(seed: int | None, num: int) -> np.ndarray:
    """The random numbers of one request, all at once: (num) float64 in [0, 1). Without a seed they come from the system."""
    return np.random.Generator(np.random.Philox(seed)).random(num)
