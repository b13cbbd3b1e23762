"""The policy under FSDP2: sharded master weights, gradient sums over ranks, AdamW, schedule and clipping.

Every rank calls the same methods in the same order; each forward, backward and step is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from molt.config import ActorSettings, FsdpSettings
from molt.errors import NonFiniteError
from molt.learn import streamed, tensor_parallel
from molt.learn.mesh import RankMesh
from molt.learn.model import TokenScorer, decoder_blocks
from molt.learn.packing import Packed
from molt.learn.routes import routers
from molt.rollout.weights import TensorFacts

SENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update did."""

    grad_norm: float
    """Before clipping, over all ranks."""
    learning_rate: float


class Policy:
    """One model that learns: packed rows in, log-probs out, then one update from the summed gradient."""

    def __init__(
        self,
        scorer: Any,
        actor: ActorSettings,
        fsdp: FsdpSettings,
        *,
        mesh: RankMesh,
        num_steps: int,
        updates_per_step: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        """num_steps: length of the schedule. updates_per_step: train.epochs_per_batch, whose passes share a step of the schedule.
        learning_rate: in place of the actor's (a critic has its own)."""
        self.actor = actor
        self.peak_learning_rate = actor.learning_rate if learning_rate is None else learning_rate
        self.device = mesh.device
        self.num_steps = num_steps
        self.updates_per_step = updates_per_step
        self.num_updates = 0
        self.revision = 0
        """Counts changes of the weights, by updates and by loading."""
        self.facts: tuple[int, dict[str, TensorFacts]] | None = None
        """Revision, and what is known of the tensors as they are sent of that revision."""
        self.is_optimizer_offloaded = fsdp.offload == "optimizer"
        """Moments lie on the host between updates."""
        self._moments: dict[tuple[int, str], torch.Tensor] = {}
        """Their places there."""
        self.is_offloaded = fsdp.offload != "none"
        """Copies of shards lie on the host too."""
        self.fsdp = fsdp
        self.scorer: Any = shard(scorer, actor, fsdp, mesh)
        self._sharded = fsdp_modules(self.scorer)
        self.parameters = [p for p in self.scorer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [{"params": part} for part in by_mesh(self.parameters).values()],
            lr=self.peak_learning_rate,
            betas=actor.adam_betas,
            weight_decay=actor.weight_decay,
        )

    def __call__(self, packed: Packed, *, wants_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) log-probs and (N,) entropies with a graph for backward."""
        return self.scorer(packed.to(self.device), wants_entropy)

    def begin(self, *, is_last: bool) -> None:
        """Before the passes of a micro-batch of a step: what fsdp keeps or defers lasts to the backward pass of the last one."""
        for module in self._sharded:
            if self.fsdp.defer_grad_sync:
                module.set_requires_gradient_sync(is_last, recurse=False)
            if not self.fsdp.reshard_after_forward:
                module.set_reshard_after_backward(is_last, recurse=False)

    @torch.no_grad()
    def score(self, packed: Packed, *, wants_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The same without a graph."""
        output = self.scorer(packed.to(self.device), wants_entropy)
        self.reshard()  # whole weights are kept for a backward pass that does not come here
        return output

    def learning_rate(self) -> float:
        """Of the next update: linear warm-up, then the schedule down to actor.min_learning_rate."""
        peak, floor = self.peak_learning_rate, self.actor.min_learning_rate
        warmup, length = self.actor.warmup_steps * self.updates_per_step, self.num_steps * self.updates_per_step
        if self.num_updates < warmup:
            return peak * (self.num_updates + 1) / warmup
        done = min(1.0, (self.num_updates - warmup) / max(1, length - warmup))
        match self.actor.schedule:
            case "linear":
                return floor + (peak - floor) * (1 - done)
            case "cosine":
                return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
            case _:
                return peak

    def update(self) -> Update:
        """Clip and step once. Raises NonFiniteError, with weights and optimizer unchanged, for a gradient that is not finite."""
        return self.apply(self.gradient_norm())

    def gradient_norm(self) -> torch.Tensor:
        """Norm over all ranks, the same on each. Raises NonFiniteError for one that is not finite, and forgets the gradient."""
        norm = total_norm([p.grad for p in self.parameters if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            bad = self._non_finite_names()
            self.forget_gradient()
            raise NonFiniteError(f"gradient norm {float(norm)}, not finite in {', '.join(bad) or 'the sum'}; the step is refused")
        return norm

    def apply(self, norm: torch.Tensor) -> Update:
        """Clip by that norm and step once."""
        scale = torch.clamp(self.actor.max_grad_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_([_local(p.grad) for p in self.parameters if p.grad is not None], scale)
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            # A loaded optimizer brings the settings of the attempt that saved it; those of this one hold.
            group.update(lr=rate, betas=self.actor.adam_betas, weight_decay=self.actor.weight_decay)
        with self.optimizer_on_device():
            self.optimizer.step()
        self.forget_gradient()
        self.num_updates += 1
        self.revision += 1
        return Update(grad_norm=float(norm), learning_rate=rate)

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Bring the moments to the device for as long as they are needed, where fsdp.offload keeps them on the host."""
        if not self.is_optimizer_offloaded:
            yield
            return
        _move_state(self.optimizer, self.device, self._moments)
        yield
        _move_state(self.optimizer, torch.device("cpu"), self._moments)

    def forget_gradient(self) -> None:
        """Drop what was accumulated since the last update."""
        self.optimizer.zero_grad(set_to_none=True)

    def shards(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A copy of what lies on this rank, by the module's own names: it stays as it is while training goes on."""
        self.reshard()
        place = torch.device("cpu") if self.is_offloaded else self.device
        return {name: _local(p.detach()).to(place, dtype, copy=True) for name, p in self.scorer.named_parameters()}

    def stream(
        self, dtype: torch.dtype | None = None, *, shards: dict[str, torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors under the model's own names, tied ones once, on the device, one at a time: nobody holds the whole model.

        A collective that every rank goes through to its end. shards: an earlier copy to gather in place of the weights of now.
        """
        self.reshard()
        for name, parameter in self.scorer.named_parameters():
            part = _local(parameter.detach()) if shards is None else shards[name]
            own = part.to(self.device, dtype or part.dtype)
            whole = DTensor(own, parameter._spec, requires_grad=False).full_tensor() if isinstance(parameter, DTensor) else own
            # A gathered tensor may be a view into a padded buffer, and on one rank it is the weight itself; what leaves is a copy.
            is_view = whole.data_ptr() == part.data_ptr() or whole.untyped_storage().nbytes() != whole.nbytes
            yield _bare(name), whole.clone() if is_view else whole

    def full_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All of them on the CPU. A collective: every rank gets all."""
        return {name: tensor.cpu() for name, tensor in self.stream(dtype)}

    def reshard(self) -> None:
        """Give back whole weights that a forward pass left behind."""
        for module in self._sharded:
            module.reshard()

    def _non_finite_names(self) -> list[str]:
        """Parameters whose local gradient is not finite; at most three."""
        named = ((_bare(name), p.grad) for name, p in self.scorer.named_parameters() if p.grad is not None)
        bad = [name for name, grad in named if not bool(torch.isfinite(_local(grad)).all())]
        return bad[:3]


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Norm over all gradients and ranks. Experts may lie on another mesh than the rest, so each mesh is summed by itself."""
    norms = [torch.nn.utils.get_total_norm(part) for part in by_mesh(grads).values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def by_mesh(tensors: list[Any]) -> dict[Any, list[Any]]:
    """Tensors grouped by the mesh that they are spread over; torch computes over one mesh at a time."""
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return groups


def shard(scorer: nn.Module, actor: ActorSettings, fsdp: FsdpSettings, mesh: RankMesh) -> nn.Module:
    """Cut for tensor parallelism, then fully_shard of every block and of the whole, also for one rank; then read the weights that are
    still in their files. Gradients are summed over ranks, not averaged."""
    for module in scorer.modules():
        if isinstance(module, TokenScorer):
            module.mesh = mesh
            if mesh.tp is not None:
                tensor_parallel.apply(module.lm, mesh.tp)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if actor.dtype == "bfloat16" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if fsdp_modules(scorer):
        return _settle(scorer, fsdp)  # the model came spread over ranks
    offload = CPUOffloadPolicy() if fsdp.offload == "full" and mesh.device_type == "cuda" else OffloadPolicy()
    if actor.moe_router_dtype == "float32":
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for router in routers(scorer):
            fully_shard(router, mesh=mesh.fsdp, mp_policy=exact, offload_policy=offload)
    for block in decoder_blocks(scorer):
        fully_shard(block, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)
    fully_shard(scorer, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)
    _read_weights(scorer, mesh, is_on_host=isinstance(offload, CPUOffloadPolicy))
    return _settle(scorer, fsdp)


def fsdp_modules(scorer: nn.Module) -> list[FSDPModule]:
    """All that gather and sum by themselves, the whole first."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def _read_weights(scorer: nn.Module, mesh: RankMesh, *, is_on_host: bool) -> None:
    """Let a sharded model take what it waits for. is_on_host: shards lie on the host."""
    for module in scorer.modules():
        if isinstance(module, TokenScorer) and module.source is not None:
            streamed.fill(module.lm, module.source, torch.device("cpu") if is_on_host else mesh.device)
            streamed.own(scorer, mesh.device)
            module.source = None


def _settle(scorer: nn.Module, fsdp: FsdpSettings) -> nn.Module:
    """Let every sharded module sum its gradients over ranks (the loss already has the denominator of the whole batch) and hold whole
    weights after a forward pass where it is asked to."""
    for module in fsdp_modules(scorer):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if not fsdp.reshard_after_forward:
            module.set_reshard_after_forward(False, recurse=False)
    return scorer


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device, held: dict[tuple[int, str], torch.Tensor]) -> None:
    """Move the moments of all parameters. held: their places on the host, page-locked once and kept."""
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                continue
            local = _local(value)
            if device.type == "cpu" and local.is_cuda:
                place = held.get((number, name))
                if place is None:
                    place = held[number, name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
                local = place.copy_(local, non_blocking=True)
            else:
                local = local.to(device, non_blocking=True)
            state[name] = _like(value, local)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what lies on the host may be read by a checkpoint next


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The same tensor with another local part, spread as before."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)


def _bare(name: str) -> str:
    """The name inside the language model."""
    return name.removeprefix("lm.")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
