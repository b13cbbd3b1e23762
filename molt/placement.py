"""Which GPU each process of a run gets: trainer ranks, frozen models, engines; side by side on the same GPUs or apart.

    apart       rank 0 | rank 1 | engine 0 | engine 1         each | is a GPU (an engine with tensor parallelism has several)
    colocated   rank 0 + engine 0 | rank 1 + engine 1         a GPU is shared in halves; memory is shared by settings

Ray gives the GPUs out as one placement group, so two ranks never meet on one GPU, which NCCL refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from molt.config import Config
from molt.engine_rules import placed_findings
from molt.errors import SettingError, StalledError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A share of one bundle of GPUs."""

    bundle: int
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who sits where."""

    bundles: tuple[int, ...]
    """GPUs in each bundle; one bundle is on one host."""
    ranks: tuple[Place, ...]
    frozen: tuple[Place, ...]
    engines: tuple[Place, ...]
    is_colocated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One place in a placement group; it pickles."""

    group: Any
    place: Place

    def options(self) -> dict[str, Any]:
        """Options of the Ray actor that takes it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=self.place.bundle)
        return {"num_gpus": self.place.num_gpus, "scheduling_strategy": strategy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """The seats of a run; all lists are empty without GPUs."""

    ranks: list[Seat] = field(default_factory=list)
    frozen: list[Seat] = field(default_factory=list)
    engines: list[Seat] = field(default_factory=list)


def lay_out(config: Config, num_gpus: int, *, has_frozen: bool, has_engines: bool = True) -> Layout:
    """Places for num_gpus GPUs. Raises SettingError when they do not suffice, with the way out.

    has_frozen: a reference or teacher in processes of its own. has_engines: false where engines run on the CPU, or there are none.
    """
    num_ranks = config.fsdp.num_ranks
    num_frozen = num_ranks if has_frozen else 0
    num_engines = config.vllm.num_engines if has_engines else 0
    width = config.vllm.tensor_parallel_size * config.vllm.data_parallel_size
    needed = num_ranks + num_frozen + num_engines * width
    mode = config.placement.trainer
    if mode == "apart" and needed > num_gpus:
        raise SettingError(
            f"placement.trainer=apart needs {needed} GPUs ({num_ranks} ranks, {num_frozen} of a frozen model, {num_engines} engines of "
            f"{width}), there are {num_gpus}; set placement.trainer=colocated or lower fsdp.num_ranks or vllm.num_engines"
        )
    is_apart = mode == "apart" or (mode == "auto" and needed <= num_gpus)
    if has_engines and (findings := list(placed_findings(config, is_colocated=not is_apart))):
        raise SettingError("\n".join(findings))
    if is_apart:
        return _apart(num_ranks, num_frozen, num_engines, width)
    return _colocated(num_ranks, num_frozen, num_engines, width, num_gpus)


def _apart(num_ranks: int, num_frozen: int, num_engines: int, width: int) -> Layout:
    first = num_ranks + num_frozen
    return Layout(
        bundles=(1,) * first + (width,) * num_engines,
        ranks=tuple(Place(bundle=n, num_gpus=1) for n in range(num_ranks)),
        frozen=tuple(Place(bundle=num_ranks + n, num_gpus=1) for n in range(num_frozen)),
        engines=tuple(Place(bundle=first + n, num_gpus=width) for n in range(num_engines)),
        is_colocated=False,
    )


def _colocated(num_ranks: int, num_frozen: int, num_engines: int, width: int, num_gpus: int) -> Layout:
    if num_engines and width > 1:
        raise SettingError(
            f"placement.trainer=colocated shares single GPUs, got engines of {width} (vllm.tensor_parallel_size x data_parallel_size); "
            "set both to 1, or placement.trainer=apart on more GPUs"
        )
    if num_ranks > num_gpus:
        raise SettingError(f"fsdp.num_ranks={num_ranks} needs as many GPUs, there are {num_gpus}; lower it")
    num_bundles = min(num_gpus, max(num_ranks, num_engines))
    half = 0.5 / (2 if num_frozen else 1)
    share = math.floor(5000 / max(1, math.ceil(num_engines / num_bundles))) / 10_000
    return Layout(
        bundles=(1,) * num_bundles,
        ranks=tuple(Place(bundle=n, num_gpus=half) for n in range(num_ranks)),
        frozen=tuple(Place(bundle=n, num_gpus=half) for n in range(num_frozen)),
        engines=tuple(Place(bundle=n % num_bundles, num_gpus=share) for n in range(num_engines)),
        is_colocated=True,
    )


@contextmanager
def take_seats(config: Config, *, has_frozen: bool, has_engines: bool, limit_s: float = 60.0) -> Iterator[Seats]:
    """Reserve the GPUs of the running Ray session; they are free again on leaving. Without GPUs there are no seats."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if num_gpus == 0:
        yield Seats()
        return
    layout = lay_out(config, num_gpus, has_frozen=has_frozen, has_engines=has_engines)
    group = placement_group([{"GPU": size} for size in layout.bundles], strategy="PACK")
    try:
        if not group.wait(limit_s):
            free = ray.available_resources().get("GPU", 0)
            raise StalledError(f"{sum(layout.bundles)} GPUs were not free within {limit_s:g} s, {free:g} are; end what holds them")
        yield Seats(
            ranks=[Seat(group=group, place=place) for place in layout.ranks],
            frozen=[Seat(group=group, place=place) for place in layout.frozen],
            engines=[Seat(group=group, place=place) for place in layout.engines],
        )
    finally:
        remove_placement_group(group)
