"""Divergence from a frozen reference: k1, k2, k3 as a reward or as a loss, and the controller of its coefficient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from molt.config import KlSettings

KlEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded here before exp: float32 exp overflows at 88, and e^20 is beyond any band."""


def kl_estimate(estimator: KlEstimator, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) per sampled token, nats (http://joschu.net/blog/kl-approx.html). # (T,)

    With d = logprobs - reference: k1 = d (unbiased, signed), k2 = d^2 / 2 (biased, >= 0), k3 = e^-d - 1 + d (unbiased, >= 0).
    """
    log_ratio_T = logprobs_T - reference_logprobs_T
    if estimator == "k1":
        return log_ratio_T
    if estimator == "k2":
        return log_ratio_T.square() / 2
    bounded_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded_T) + bounded_T


def kl_loss(
    estimator: KlEstimator,
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    scale_T: Tensor,
    weights_T: Tensor | None = None,
) -> Tensor:
    """Divergence as a loss: sum(scale * weight * k). Its value is the estimator's, its gradient is that of the divergence.

    Differentiating k1 or k3 as they stand is wrong: the sampled token also depends on the policy, so the expectation of
    the plain gradient is 0 for k1 and the forward divergence for k3. With the score term, k1 and k3 both give d * grad log p
    per token (k1 up to a term of mean 0), and so does the plain gradient of k2: the gradient of KL(policy || reference).
    weights_T are importance weights of the gate; a token of weight 0 has no gradient.
    """
    live_T = scale_T != 0 if weights_T is None else (scale_T != 0) & (weights_T != 0)
    policy_T = torch.where(live_T, logprobs_T, 0.0)
    reference_T = torch.where(live_T, reference_logprobs_T, 0.0)
    value_T = kl_estimate(estimator, policy_T.detach(), reference_T)
    coefficient_T = (policy_T.detach() - reference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_T = value_T + coefficient_T * (policy_T - policy_T.detach())
    factor_T = scale_T if weights_T is None else scale_T * weights_T
    return torch.where(live_T, factor_T * token_T, 0.0).sum()


def next_coefficient(coefficient: float, measured: float, *, target: float | None, horizon: int, n_steps: int = 1) -> float:
    """Coefficient for the next step: unchanged without a target, else moved towards it (arXiv 1909.08593, 2.2).

    coefficient * (1 + clip(measured / target - 1, -0.2, 0.2) * n_steps / horizon). n_steps counts rollouts of the batch.
    """
    if target is None:
        return coefficient
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * n_steps / horizon)


def coefficient_after(settings: KlSettings, reached: float | None) -> float:
    """Coefficient that a run goes on with. reached: by the controller of its checkpoint; without one now, the settings alone say."""
    return reached if settings.target is not None and reached else settings.coef
