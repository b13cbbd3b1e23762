"""Log-probs and entropies of sampled tokens on a GPU: the logits are read once, and become their own gradient in place.

forward    logits of a chunk (one matrix product, the model's dtype) --one pass--> log-prob, entropy, log of the normaliser
backward   the same logits, kept where memory is ample and made again where not --one pass--> gradient in their place --> two products

Nothing of the size of the vocabulary exists in float32. Same values as molt.learn.logprob up to the order of sums; every row is
summed by one program, so a step computed twice has the same bits. Axes: molt.learn.logprob; c tokens of one chunk.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

CHUNK_BYTES = 1 << 30
"""Largest (c, V) block of logits in the model's dtype: the fewer blocks, the fewer passes over the gradient of the weight."""
KEPT_SHARE = 0.25
"""Share of the free memory that logits may take until the backward pass."""
BLOCK = 4096
"""Entries of the vocabulary that one step of a program takes."""


def is_usable(hidden_ND: torch.Tensor) -> bool:
    """Whether these kernels run where the hidden states are."""
    return hidden_ND.is_cuda and find_spec("triton") is not None


def head_logprobs(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, target_N: torch.Tensor, temperature_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target under softmax(logits / temperature), and the entropy there. Both (N,) float32."""
    return _FusedHead.apply(hidden_ND, weight_VD, bias_V, target_N, temperature_N)


class _FusedHead(torch.autograd.Function):
    """hidden_ND, weight_VD -> log-prob and entropy of each target."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, target_N, temperature_N):  # type: ignore[no-untyped-def]
        n, size = len(target_N), weight_VD.shape[0]
        logprobs_N = torch.empty(n, dtype=torch.float32, device=hidden_ND.device)
        entropy_N, total_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        is_learning = any(ctx.needs_input_grad)
        kept: list[torch.Tensor] | None = [] if is_learning and n * size * hidden_ND.element_size() <= _room(hidden_ND.device) else None
        for span in _spans(n, size, hidden_ND.element_size()):
            logits = _logits(hidden_ND[span], weight_VD, bias_V)  # (c, V)
            scan(logits, target_N[span], temperature_N[span], logprobs_N[span], entropy_N[span], total_N[span])
            if kept is not None:
                kept.append(logits)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N, total_N)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):  # type: ignore[no-untyped-def]
        hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N, total_N = ctx.saved_tensors
        n, size = len(target_N), weight_VD.shape[0]
        grad_hidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and ctx.needs_input_grad[2] else None
        zero_N = torch.zeros_like(total_N)
        by_logp = zero_N if grad_logp_N is None else grad_logp_N.float().contiguous()
        by_entropy = zero_N if grad_entropy_N is None else grad_entropy_N.float().contiguous()
        for number, span in enumerate(_spans(n, size, hidden_ND.element_size())):
            logits = ctx.kept[number] if ctx.kept is not None else _logits(hidden_ND[span], weight_VD, bias_V)
            turn(logits, target_N[span], temperature_N[span], entropy_N[span], total_N[span], by_logp[span], by_entropy[span])
            if grad_hidden is not None:
                torch.mm(logits, weight_VD, out=grad_hidden[span])
            if grad_weight is not None:
                grad_weight += logits.t() @ hidden_ND[span]
            if grad_bias is not None:
                grad_bias += logits.float().sum(0)
            if ctx.kept is not None:
                ctx.kept[number] = None
        ctx.kept = None
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
        )


def _logits(hidden_cD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    """(c, V) in the model's dtype."""
    logits = hidden_cD @ weight_VD.t()
    return logits if bias_V is None else logits.add_(bias_V)


def _room(device: torch.device) -> int:
    """Bytes that logits may take until the backward pass."""
    if device.type != "cuda":
        return 0
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(KEPT_SHARE * free)


def _spans(n: int, size: int, width: int) -> list[slice]:
    """Slices that cover n tokens; width: bytes of one logit."""
    step = max(1, CHUNK_BYTES // (size * width))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def scan(
    logits: torch.Tensor, target_c: torch.Tensor, temperature_c: torch.Tensor, logp_c: torch.Tensor, entropy_c: torch.Tensor,
    total_c: torch.Tensor,
) -> None:  # fmt: skip
    """Fill log-prob of the target, entropy and log of the normaliser of each row of logits (c, V)."""
    kernels()[0][(len(logits),)](
        logits, target_c, temperature_c, logp_c, entropy_c, total_c, logits.shape[1], logits.stride(0), BLOCK=BLOCK, num_warps=8
    )


def turn(
    logits: torch.Tensor, target_c: torch.Tensor, temperature_c: torch.Tensor, entropy_c: torch.Tensor, total_c: torch.Tensor,
    by_logp_c: torch.Tensor, by_entropy_c: torch.Tensor,
) -> None:  # fmt: skip
    """Replace logits (c, V) by the gradient with respect to them."""
    grid = (len(logits), -(-logits.shape[1] // BLOCK))
    kernels()[1][grid](
        logits, target_c, temperature_c, entropy_c, total_c, by_logp_c, by_entropy_c, logits.shape[1], logits.stride(0), BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip


@cache
def kernels() -> tuple[Any, Any]:
    """The two kernels. Made on first use: a machine without a GPU needs no triton."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def scan_rows(logits, target, temperature, logp, entropy, total, size, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * stride
        heat = tl.load(temperature + row)
        top = -float("inf")
        mass = 0.0
        mean = 0.0
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(base + place, mask=place < size, other=-float("inf")).to(tl.float32) / heat
            highest = tl.maximum(top, tl.max(x, axis=0))
            p = tl.exp(x - highest)
            shrink = tl.exp(top - highest)
            mass = mass * shrink + tl.sum(p, axis=0)
            mean = mean * shrink + tl.sum(p * tl.where(place < size, x, 0.0), axis=0)
            top = highest
        whole = top + tl.log(mass)
        chosen = tl.load(base + tl.load(target + row)).to(tl.float32) / heat
        tl.store(logp + row, chosen - whole)
        tl.store(entropy + row, whole - mean / mass)
        tl.store(total + row, whole)

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_rows(logits, target, temperature, entropy, total, by_logp, by_entropy, size, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        spot = logits + row * stride + place
        heat = tl.load(temperature + row)
        logp = tl.load(spot, mask=place < size, other=0.0).to(tl.float32) / heat - tl.load(total + row)
        p = tl.exp(logp)
        pull = tl.load(by_logp + row)
        # d logp_target / d logits = onehot - p;  d H / d logits = -p (logp + H)
        slope = tl.where(place == tl.load(target + row), pull, 0.0) - pull * p
        slope -= tl.load(by_entropy + row) * p * (logp + tl.load(entropy + row))
        tl.store(spot, (slope / heat).to(logits.dtype.element_ty), mask=place < size)

    return scan_rows, turn_rows
