"""The order of prompts: a seeded permutation for each epoch, and the cursor that the log implies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place in the order of prompts."""

    position: int
    """Counts over all epochs, from 0."""
    epoch: int
    order_index: int
    """Place in the permutation of the epoch."""
    prompt_index: int
    """Line of the prompt in its data set."""

    @property
    def group_id(self) -> str:
        """Name of the group of this prompt in this epoch."""
        return f"e{self.epoch}-p{self.prompt_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """Every prompt once in each epoch, in an order that seed and epoch alone decide."""

    num_prompts: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_prompts > 0, "an order of no prompts"

    def place(self, position: int) -> Place:
        """The place at a position, 0 being the first prompt of the run."""
        epoch, order_index = divmod(position, self.num_prompts)
        prompt_index = int(_permutation(self.seed, epoch, self.num_prompts)[order_index])
        return Place(position=position, epoch=epoch, order_index=order_index, prompt_index=prompt_index)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_prompts: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_prompts)


def next_position(dispatched: Iterable[tuple[int, int]], num_prompts: int) -> int:
    """First position that was never dispatched, from the (epoch, order_index) of every group_dispatched event.

    Groups are dispatched in order, so the answer is one past the largest; a hole is a broken log.
    """
    positions = {epoch * num_prompts + order_index for epoch, order_index in dispatched}
    cursor = max(positions, default=-1) + 1
    assert len(positions) == cursor, f"dispatched positions have a hole: {cursor - len(positions)} of {cursor} are missing"
    return cursor
