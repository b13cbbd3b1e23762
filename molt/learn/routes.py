"""Routing replay: tokens go to the experts that the engine chose when it sampled, with weights from the trainer's own logits.

    engine's choice (log) -> laid by absolute position -> router: live choice where it is unknown (-1), the engine's elsewhere
                                                          -> weights gathered from live probabilities, so the router learns

The choice stays in place until the next forward pass, so that activation checkpointing finds it again in the backward pass.
Axes: L packed tokens, M layers with experts, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from molt.errors import LineageError, SettingError

UNKNOWN = -1
SOFTMAX_ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "OlmoeTopKRouter")
"""Hugging Face routers that take the K most probable experts of a softmax."""
MIN_TOKENS = 1000
"""Tokens from which on a step's share of known routes, and the agreement of a layer, are judged."""
MIN_SHARE = 0.5
"""Of tokens whose routes are known: below it a step that says that it replays mostly does not."""


@dataclass(slots=True)
class RouteCounts:
    """Counts of one layer; they add over forward passes and ranks."""

    n_tokens: int = 0
    n_replayed: int = 0
    overlap: float = 0.0
    """Sum over replayed tokens of the share of the engine's experts that the trainer would have chosen too."""


class RouteSlot:
    """What one router is to choose. It also answers to the replay protocol of NeMo AutoModel's gate (apply)."""

    def __init__(self, name: str, *, num_experts: int, top_k: int) -> None:
        self.name = name
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        self.layer = None if found is None else int(found[1])
        """Number of its layer in the model, those without experts counted; None where the name tells none."""
        self.num_experts = num_experts
        self.top_k = top_k
        self.target_LK: torch.Tensor | None = None
        self.n_padding = 0
        """Tokens at the end that belong to no row."""
        self.is_replayed = True
        """False: the engine's experts are compared with the live ones, which stay."""
        self.counts = RouteCounts()

    def apply(self, live_LK: torch.Tensor) -> torch.Tensor:
        """The engine's experts where known, else the live ones. # (L, K)"""
        self.counts.n_tokens += len(live_LK) - self.n_padding
        if self.target_LK is None:
            return live_LK
        assert self.target_LK.shape == live_LK.shape, f"{self.name}: {tuple(self.target_LK.shape)} routes for {tuple(live_LK.shape)} tokens"
        is_known_L = (self.target_LK >= 0).all(-1)
        is_shared_LK = (self.target_LK[:, :, None] == live_LK[:, None, :]).any(-1)
        self.counts.n_replayed += int(is_known_L.sum())
        self.counts.overlap += float(is_shared_LK[is_known_L].double().sum()) / self.top_k
        if not self.is_replayed:
            return live_LK
        return torch.where(is_known_L[:, None], self.target_LK.to(live_LK.dtype), live_LK)


class Routes:
    """All routers of a model, in layer order.

    Engines tell a row for each layer with experts, or for each layer of the model; of the latter the layers with experts are taken.
    """

    def __init__(self, slots: Sequence[RouteSlot], *, num_layers: int) -> None:
        """num_layers: all layers of the model."""
        self.slots = list(slots)
        self.num_layers = num_layers

    @classmethod
    def install(cls, lm: nn.Module, *, setting: str = "train.routing_replay=true") -> Routes:
        """Put a slot into every router. Raises SettingError for a model without a router that can replay."""
        slots = []
        for name, module in lm.named_modules():
            kind = type(module).__name__
            if kind in SOFTMAX_ROUTERS:
                slot = RouteSlot(name, num_experts=int(module.num_experts), top_k=int(module.top_k))
                module.forward = MethodType(_router_forward(slot), module)
            elif kind == "Gate" and hasattr(module, "router_replay"):
                slot = RouteSlot(name, num_experts=int(module.n_experts), top_k=int(module.topk))
                module.router_replay = slot
            else:
                continue
            slots.append(slot)
        if not slots:
            raise SettingError(f"{setting}, the model has no router that Molt knows; leave the setting out")
        config: Any = lm.config
        return cls(slots, num_layers=int(config.get_text_config().num_hidden_layers))

    def check(self, routes_LMK: np.ndarray, where: str) -> None:
        """LineageError for routes that this model cannot have made: another number of layers or experts per token, or an unknown expert."""
        slots = self.slots
        if routes_LMK.shape[1] not in self._layouts() or routes_LMK.shape[2] != slots[0].top_k:
            found = f"{routes_LMK.shape[1]} layers and {routes_LMK.shape[2]} experts of a token"
            raise LineageError(
                f"{where}: routes of {found}, the trainer has {len(slots)} layers with experts and chooses {slots[0].top_k}; "
                "engine and trainer disagree about the model"
            )
        if routes_LMK.size and not UNKNOWN <= int(routes_LMK.min()) <= int(routes_LMK.max()) < slots[0].num_experts:
            raise LineageError(f"{where}: expert {int(routes_LMK.max())} of {slots[0].num_experts}; the routes are damaged")

    def lay(self, routes_LMK: torch.Tensor | None, *, n_padding: int = 0) -> None:
        """Choose these experts in every forward and backward pass until the next call; None is live routing.

        n_padding: tokens at the end that belong to no row, and count as none.
        """
        places = [] if routes_LMK is None else self._layouts()[routes_LMK.shape[1]]
        for number, slot in enumerate(self.slots):
            slot.target_LK = None if routes_LMK is None else routes_LMK[:, places[number]].long()
            slot.n_padding = n_padding

    def _layouts(self) -> dict[int, list[int]]:
        """Rows of the layers with experts among the rows that an engine tells, by the number of those."""
        layers = [slot.layer for slot in self.slots]
        whole = {} if None in layers else {self.num_layers: [layer for layer in layers if layer is not None]}
        return whole | {len(self.slots): list(range(len(self.slots)))}

    def observe(self, *, is_replayed: bool) -> None:
        """Whether what is laid is taken, or only compared with the live choice."""
        for slot in self.slots:
            slot.is_replayed = is_replayed

    def take_counts(self) -> list[RouteCounts]:
        """Counts of each layer since the last call."""
        counts = [slot.counts for slot in self.slots]
        for slot in self.slots:
            slot.counts = RouteCounts()
        return counts

    def misrouted(self, counts: Sequence[RouteCounts]) -> str | None:
        """Why the routes of a step cannot be trusted: most tokens have none, or those of a layer agree with the trainer's no better than
        twice chance, so that they are of another layer, or damaged."""
        n_tokens, n_replayed = sum(count.n_tokens for count in counts), sum(count.n_replayed for count in counts)
        if n_tokens >= MIN_TOKENS * len(counts) and n_replayed < MIN_SHARE * n_tokens:
            return f"the engine told the routes of {n_replayed / n_tokens:.2f} of the tokens, at least {MIN_SHARE} are needed for a replay"
        for slot, count in zip(self.slots, counts, strict=True):
            floor = min(0.9, 2 * slot.top_k / slot.num_experts)
            if count.n_replayed >= MIN_TOKENS and count.overlap / count.n_replayed < floor:
                share = count.overlap / count.n_replayed
                return f"routes of layer {slot.name} agree with the trainer's in {share:.2f} of the experts, chance is {floor / 2:.2f}"
        return None


def routers(lm: nn.Module) -> list[nn.Module]:
    """Routers whose forward this module makes."""
    return [module for module in lm.modules() if type(module).__name__ in SOFTMAX_ROUTERS]


def pack_routes(rows: Sequence[np.ndarray | None], lengths: Sequence[int]) -> torch.Tensor | None:
    """Routes of packed rows, -1 for a row without any; None when no row has routes. # (L, M, K) int16"""
    shape = next((routes.shape[1:] for routes in rows if routes is not None), None)
    if shape is None:
        return None
    parts = [
        np.full((length, *shape), UNKNOWN, np.int16) if routes is None else _padded(routes, length)
        for routes, length in zip(rows, lengths, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


def add_counts(parts: Sequence[Sequence[RouteCounts]]) -> list[RouteCounts]:
    """Counts of each layer over ranks."""
    return [
        RouteCounts(
            n_tokens=sum(c.n_tokens for c in layer),
            n_replayed=sum(c.n_replayed for c in layer),
            overlap=sum(c.overlap for c in layer),
        )
        for layer in zip(*parts, strict=True)
    ]


def route_metrics(counts: Sequence[RouteCounts]) -> dict[str, float]:
    """Share of tokens that were replayed, and the agreement of the worst layer."""
    n_tokens, n_replayed = sum(c.n_tokens for c in counts), sum(c.n_replayed for c in counts)
    if not n_tokens or not n_replayed:
        return {"replayed_share": 0.0}
    agreement = [c.overlap / c.n_replayed for c in counts if c.n_replayed]
    return {
        "replayed_share": n_replayed / n_tokens,
        "expert_agreement_mean": sum(agreement) / len(agreement),
        "expert_agreement_min": min(agreement),
    }


def _padded(routes: np.ndarray, length: int) -> np.ndarray:
    """Routes by absolute position, -1 where the engine did not forward the token any more."""
    if len(routes) > length:
        raise LineageError(f"routes of {len(routes)} tokens for a segment of {length}; they are of another segment")
    tail = np.full((length - len(routes), *routes.shape[1:]), UNKNOWN, np.int16)
    return np.concatenate([routes.astype(np.int16), tail])


def _router_forward(slot: RouteSlot) -> Any:
    """The forward of a Hugging Face top-k router with the choice replaced; probabilities, and with them the gradient, stay live."""

    def forward(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden_LD = hidden_states.reshape(-1, router.hidden_dim)
        logits_LE = nn.functional.linear(hidden_LD.to(router.weight.dtype), router.weight)
        probs_LE = torch.softmax(logits_LE, dim=-1, dtype=torch.float32)
        chosen_LK = slot.apply(torch.topk(probs_LE, router.top_k, dim=-1).indices)
        weights_LK = probs_LE.gather(1, chosen_LK)
        if router.norm_topk_prob:
            weights_LK = weights_LK / weights_LK.sum(dim=-1, keepdim=True)
        return logits_LE, weights_LK.to(hidden_LD.dtype), chosen_LK

    return forward
