"""Tensor parallelism: the layers of a Hugging Face model cut as its own plan says, and a vocabulary that is cut too.

transformers brings the plan of each architecture and the styles that carry it out (DTensors and the collectives around each layer);
FSDP2 shards what is left. Three things are done here. Gradients of weights that every part applies to its own heads are summed in the
backward pass itself, because a hook on .grad would count micro-batches twice. Embedding and output head are cut by vocabulary. Experts
are handed out whole, since checkpoints cannot hold a gate and an up projection that are cut inside one tensor: every part routes all
tokens alike, computes those of its own experts, and the parts are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from molt.errors import SettingError

SUMMED = "replicated_with_grad_allreduce"
"""The style of weights that each part applies to other heads."""
EXPERTS = "moe_tp_experts"
"""The style of modules that hold experts."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Where configs of models keep the number of experts."""


def apply(lm: Any, mesh: DeviceMesh) -> None:
    """Cut a loaded model in place. Raises SettingError for a model without a plan, or with sizes that do not divide."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    size = mesh.size()
    plan = dict(getattr(lm, "tp_plan", None) or {})
    if not plan:
        raise SettingError(f"fsdp.tp_size={size}, transformers has no tensor-parallel plan for {type(lm).__name__}; set fsdp.tp_size=1")
    if findings := list(indivisible(lm.config.get_text_config(), size)):
        raise SettingError("\n".join(findings))
    summed, experts = ({name for name, style in plan.items() if style == kind} for kind in (SUMMED, EXPERTS))
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    names = {id(module): name for name, module in lm.named_modules()}
    is_tied = head is not None and getattr(head, "weight", None) is embedding.weight
    lm.tp_plan = {name: style for name, style in plan.items() if name not in summed and not _belongs(name, experts)} | {
        **{f"{name}.{weight}": "grouped_gemm" for name in experts for weight in _weights(lm, name)},
        names[id(embedding)]: "embedding_rowwise",
        **({names[id(head)]: "colwise_gather_output"} if isinstance(head, nn.Linear) else {}),
    }
    apply_tensor_parallelism(lm, mesh)
    if is_tied:
        head.weight = embedding.weight
    for name, module in lm.named_modules():
        if _pattern(name) in summed:
            module.forward = _with_sums(module, module.forward, mesh.get_group())
        elif _pattern(name) in experts:
            module.forward = _own_experts(module, module.forward, mesh.get_group())


def indivisible(config: Any, size: int) -> Iterator[str]:
    """What of a model's shape tp_size does not divide, with the way out. config: of the text model."""
    shapes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "hidden columns of the feed-forward layers": config.intermediate_size,
        "experts": next((n for name in EXPERT_COUNTS if (n := getattr(config, name, None))), size),
        "entries of the vocabulary": config.vocab_size,
    }
    for what, count in shapes.items():
        if count % size:
            yield f"fsdp.tp_size={size} does not divide the model's {count} {what}; set fsdp.tp_size={_largest(count, size)} or less"


def local_head(head: nn.Linear, mesh: DeviceMesh | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of the output head as this rank has them: whole, or its entries of the vocabulary."""
    from torch.distributed.tensor import DTensor

    def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to_local() if mesh is not None and isinstance(tensor, DTensor) else tensor

    weight = local(head.weight)
    assert weight is not None, "an output head has a weight"
    return weight, local(head.bias)


def _belongs(name: str, experts: set[str]) -> bool:
    """Whether a name of a plan is a module of experts or a weight of one."""
    return any(name == module or name.startswith(f"{module}.") for module in experts)


def _weights(lm: nn.Module, pattern: str) -> list[str]:
    """Names of the weights of a module that a plan names by pattern; the same in every layer."""
    found = next((module for name, module in lm.named_modules() if _pattern(name) == pattern), None)
    return [] if found is None else [name for name, _ in found.named_parameters(recurse=False)]


def _largest(count: int, below: int) -> int:
    """The largest divisor of count that is below a size."""
    return next(size for size in range(below - 1, 0, -1) if count % size == 0)


def _pattern(name: str) -> str:
    """A module's name with its layer number as the plan writes it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _with_sums(module: nn.Module, forward: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        module._parameters.update({n: None if p is None else SumGradient.apply(p, group) for n, p in own.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return run


def _own_experts(module: nn.Module, forward: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    """The forward of a module of experts with those of this rank; tokens of others are left out and the parts are added."""
    from torch.distributed.tensor import DTensor

    def run(hidden_LD: torch.Tensor, chosen_LK: torch.Tensor, weights_LK: torch.Tensor) -> torch.Tensor:
        num: int = module.num_experts  # type: ignore[assignment]  # of this rank
        local_LK = chosen_LK - num * dist.get_rank(group)
        is_own_LK = (local_LK >= 0) & (local_LK < num)
        own = dict(module._parameters)
        module._parameters.update({n: p.to_local() if isinstance(p, DTensor) else p for n, p in own.items()})
        try:
            part_LD = forward(
                SumGradient.apply(hidden_LD, group),
                torch.where(is_own_LK, local_LK, num),  # num: nobody here
                torch.where(is_own_LK, SumGradient.apply(weights_LK, group), 0),
            )
        finally:
            module._parameters.update(own)
        return SumParts.apply(part_LD, group)

    return run


class SumGradient(torch.autograd.Function):
    """The tensor itself; its gradient is the sum of those on all ranks of the group."""

    @staticmethod
    def forward(ctx, tensor, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumParts(torch.autograd.Function):
    """The sum over all ranks of the group; its gradient, the same on all of them, goes to each part."""

    @staticmethod
    def forward(ctx, tensor, group):  # type: ignore[no-untyped-def]
        whole = tensor.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None
