"""Log-probs and entropies of sampled tokens in chunks: the vocabulary is never held for a whole batch.

Under tensor parallelism each rank has a part of the vocabulary; ranks exchange maxima and sums of a chunk, never its logits.
Axes: N sampled tokens, D hidden size, V vocabulary (of this rank). Logits are divided by the temperature in float32, whatever the
model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from molt.learn import fused_head

CHUNK_FLOATS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Largest (chunk, V) float32 block: 32 MiB on the CPU; 512 MiB on a GPU, where small blocks are launches and little else."""

KEPT_FLOATS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Most log-probs of the vocabulary that wait for the backward pass instead of being made again: 128 MiB and 1 GiB."""


def chunk_size(vocab_size: int, device_type: str = "cpu") -> int:
    """Tokens per chunk."""
    return max(1, CHUNK_FLOATS[device_type] // vocab_size)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which entries this rank has: all of them without a group, else an equal share in rank order."""

    group: dist.ProcessGroup | None = None

    def own(self, target_c: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets as places among this rank's entries, 0 where another rank has them, and 1.0 where this one does."""
        place_c = target_c if self.group is None else target_c - size * dist.get_rank(self.group)
        is_own_c = (place_c >= 0) & (place_c < size)
        return torch.where(is_own_c, place_c, 0), is_own_c.float()

    def reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """The same over all ranks' entries."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _HeadLogprobs(torch.autograd.Function):
    """hidden_ND, weight_VD -> log-prob and entropy of each target. Few log-probs are kept for the backward pass, many made again."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, target_N, temperature_N, wants_entropy, vocabulary):  # type: ignore[no-untyped-def]
        ctx.vocabulary = vocabulary
        logprobs_N = torch.empty(len(target_N), dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.zeros_like(logprobs_N)
        kept: list[torch.Tensor] | None = [] if len(target_N) * weight_VD.shape[0] <= KEPT_FLOATS[weight_VD.device.type] else None
        for span in _spans(len(target_N), weight_VD):
            logp = _all_logprobs(hidden_ND[span], weight_VD, bias_V, temperature_N[span], vocabulary)  # (c, V)
            if kept is not None:
                kept.append(logp)
            place, is_own = vocabulary.own(target_N[span], weight_VD.shape[0])
            logprobs_N[span] = vocabulary.reduce(logp.gather(1, place[:, None])[:, 0] * is_own)
            if wants_entropy:
                entropy_N[span] = -vocabulary.reduce((logp.exp() * logp).sum(-1))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N)
        ctx.kept = kept
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward pass
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):  # type: ignore[no-untyped-def]
        hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and ctx.needs_input_grad[2] else None
        for number, span in enumerate(_spans(len(target_N), weight_VD)):
            if ctx.kept is not None:
                logp = ctx.kept[number]
            else:
                logp = _all_logprobs(hidden_ND[span], weight_VD, bias_V, temperature_N[span], ctx.vocabulary)
            p = logp.exp()
            grad = torch.zeros_like(p)
            if grad_logp_N is not None:  # d logp_target / d logits = onehot - p
                torch.mul(p, -grad_logp_N[span, None], out=grad)
                place, is_own = ctx.vocabulary.own(target_N[span], weight_VD.shape[0])
                grad.scatter_add_(1, place[:, None], (grad_logp_N[span] * is_own)[:, None])
            if grad_entropy_N is not None:  # d H / d logits = -p (logp + H)
                grad -= grad_entropy_N[span, None] * p * (logp + entropy_N[span, None])
            grad = grad.div_(temperature_N[span, None]).to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden[span] = grad @ weight_VD
            if grad_weight is not None:
                grad_weight += (grad.t() @ hidden_ND[span]).float()
            if grad_bias is not None:
                grad_bias += grad.float().sum(0)
        ctx.kept = None
        return (
            None if grad_hidden is None else ctx.vocabulary.reduce(grad_hidden),
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def head_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_N: torch.Tensor,
    temperature_N: torch.Tensor,
    *,
    wants_entropy: bool,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target under softmax(logits / temperature), and the entropy there (perhaps zeros if not wanted). (N,) float32.

    group: ranks that share the vocabulary; every one has the same hidden states, and its own rows of the weight.
    """
    if group is None and fused_head.is_usable(hidden_ND):
        return fused_head.head_logprobs(hidden_ND, weight_VD, bias_V, target_N, temperature_N)
    return _HeadLogprobs.apply(hidden_ND, weight_VD, bias_V, target_N, temperature_N, wants_entropy, Vocabulary(group))


def logits_logprobs(logits_NV: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from logits that a model made itself (soft-capped or scaled heads)."""
    logp_NV = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
    # FSDP hangs its backward hook on what a forward returns, which must not be a view.
    return logp_NV.gather(1, target_N[:, None]).sum(1), -(logp_NV.exp() * logp_NV).sum(-1)


def _all_logprobs(
    hidden_cD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, temperature_c: torch.Tensor, vocabulary: Vocabulary
) -> torch.Tensor:
    """(c, V) float32: log-probs of the whole vocabulary, or of this rank's entries of it."""
    logits = _logits(hidden_cD, weight_VD, bias_V, temperature_c)
    if vocabulary.group is None:
        return torch.log_softmax(logits, dim=-1)
    logits -= vocabulary.reduce(logits.max(-1).values, dist.ReduceOp.MAX)[:, None]
    return logits - vocabulary.reduce(logits.exp().sum(-1)).log()[:, None]


def _logits(hidden_cD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, temperature_c: torch.Tensor) -> torch.Tensor:
    """(c, V) float32: the model's own logits, upcast, then divided by the temperature."""
    logits = hidden_cD @ weight_VD.t()
    if bias_V is not None:
        logits = logits + bias_V
    return logits.float() / temperature_c[:, None]


def _spans(n: int, weight_VD: torch.Tensor) -> list[slice]:
    """Slices that cover n tokens."""
    step = chunk_size(weight_VD.shape[0], weight_VD.device.type)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]
