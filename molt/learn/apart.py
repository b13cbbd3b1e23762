"""Do rows that are packed together see each other? Asked of the model itself, at the start of every run.

A layer that packing does not know (a convolution, a state, an attention that takes one mask for the whole batch) lets a row see its
neighbours, and says nothing. Three rows are scored, then again with the outer two changed: the middle one has to stay as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from molt.errors import SettingError
from molt.learn.packing import Packed, pack

LENGTH = 24
"""Tokens of each row."""
NEAREST = 8
"""Tokens of the middle row, from its beginning on, that are compared: a short reach over the border shows there only."""
LIMIT = 0.1
"""Of what a change moves in its own row. Dense rows did not move at all (docs/evidence/attention.json), a leak moves them about as much as
the row itself; a token that a router sends elsewhere for a last bit would lie between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsApart:
    """How far scores move, as shares of what the changed rows themselves move."""

    leak: float
    """The middle row, when its neighbours are others."""
    noise: float
    """The middle row, when nothing changes."""


def rows_apart(score: Callable[[Packed], torch.Tensor], *, num_entries: int, without: frozenset[int] = frozenset()) -> RowsApart | None:
    """Ask a model; None where its scores do not depend on its input, or are no numbers. A collective where the model is one.

    score: scores of the packed targets, (N,). num_entries: of the vocabulary. without: ids that need more than themselves (images).
    """
    usable = np.setdiff1d(np.arange(num_entries), sorted(without)).astype(np.int32)
    first, middle, last, other_first, other_last = np.random.default_rng(0).choice(usable, (5, LENGTH))
    mask = np.arange(LENGTH) >= 1

    def scores(*rows: np.ndarray) -> torch.Tensor:
        return score(pack(rows, [mask] * len(rows))).detach().float().cpu().view(len(rows), LENGTH - 1)

    before, again, after = scores(first, middle, last), scores(first, middle, last), scores(other_first, middle, other_last)
    own = float((after - before)[[0, 2]].abs().mean())
    if own == 0.0 or not math.isfinite(own):
        return None
    return RowsApart(leak=_moved(after, before) / own, noise=_moved(again, before) / own)


def refuse_leaks(score: Callable[[Packed], torch.Tensor], config: Any, *, path: str, attention: str) -> None:
    """SettingError for a model whose rows see each other, or that scores the same row otherwise each time. config: the model's own."""
    without = {getattr(config, f"{kind}_token_{name}", None) for kind in ("image", "video", "audio") for name in ("id", "index")}
    found = rows_apart(
        score, num_entries=int(config.get_text_config().vocab_size), without=frozenset(number for number in without if number is not None)
    )
    if found is None:
        return
    wayout = "take another model or attention, or set fsdp.packing_check=false if you know better"
    if found.noise > LIMIT:
        raise SettingError(
            f"actor.model_name_or_path={path}, the same row scored twice differs by {found.noise:.2f} of what another row differs: "
            f"the model draws at random (a dropout of its own?), which no engine does; {wayout}"
        )
    if found.leak > LIMIT:
        raise SettingError(
            f"fsdp.attn_implementation={attention} with actor.model_name_or_path={path}, a packed row changes by {found.leak:.2f} of what "
            f"its neighbours change: rows see each other; {wayout}"
        )


def _moved(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean distance of the first tokens of the middle row."""
    return float((one - other)[1, :NEAREST].abs().mean())
