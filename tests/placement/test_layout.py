"""Places of ranks, frozen models and engines on the GPUs of a run."""

from __future__ import annotations

import pickle

import pytest

from molt.config import Config
from molt.errors import SettingError
from molt.placement import Place, Seat, lay_out


def config(**rooms: dict[str, object]) -> Config:
    return Config.model_validate(rooms)


def test_one_gpu_is_shared_in_halves() -> None:
    layout = lay_out(config(), 1, has_frozen=False)
    assert layout.is_colocated and layout.bundles == (1,)
    assert layout.ranks == (Place(bundle=0, num_gpus=0.5),) and layout.engines == (Place(bundle=0, num_gpus=0.5),)


def test_two_gpus_are_used_apart() -> None:
    layout = lay_out(config(), 2, has_frozen=False)
    assert not layout.is_colocated and layout.bundles == (1, 1)
    assert layout.ranks == (Place(bundle=0, num_gpus=1),) and layout.engines == (Place(bundle=1, num_gpus=1),)


def test_colocated_ranks_never_meet_and_engines_share_what_is_left() -> None:
    # 2 ranks on 2 GPUs, 3 engines: two of them on GPU 0, so each engine asks for a quarter.
    layout = lay_out(config(fsdp={"num_ranks": 2}, vllm={"num_engines": 3}, placement={"trainer": "colocated"}), 2, has_frozen=False)
    assert [place.bundle for place in layout.ranks] == [0, 1]
    assert [(place.bundle, place.num_gpus) for place in layout.engines] == [(0, 0.25), (1, 0.25), (0, 0.25)]


def test_a_frozen_model_apart_has_places_of_its_own() -> None:
    # 1 rank + 1 frozen + 1 engine of 2 GPUs = 4 GPUs in 3 bundles
    layout = lay_out(config(vllm={"tensor_parallel_size": 2}), 4, has_frozen=True)
    assert layout.bundles == (1, 1, 2) and layout.engines == (Place(bundle=2, num_gpus=2),)


def test_shares_of_a_gpu_never_exceed_it() -> None:
    for num_engines in range(1, 8):
        layout = lay_out(config(vllm={"num_engines": num_engines}), 1, has_frozen=True)
        assert sum(place.num_gpus for place in (*layout.ranks, *layout.frozen, *layout.engines)) <= 1


@pytest.mark.parametrize(
    ("rooms", "says"),
    [
        ({"placement": {"trainer": "apart"}}, "needs 2 GPUs"),
        ({"placement": {"trainer": "colocated"}, "vllm": {"tensor_parallel_size": 2}}, "engines of 2"),
        ({"fsdp": {"num_ranks": 2}}, "fsdp.num_ranks=2"),
        ({"vllm": {"weight_transfer": "nccl"}}, "broadcast between GPUs"),
    ],
)
def test_too_few_gpus_are_told_with_the_way_out(rooms: dict[str, dict[str, object]], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        lay_out(config(**rooms), 1, has_frozen=False)


@pytest.mark.parametrize("vllm", [{"weight_transfer": "ipc"}, {"sleep_level": 1}])
def test_what_needs_a_shared_gpu_is_refused_where_trainer_and_engines_come_to_stand_apart(vllm: dict[str, object]) -> None:
    assert lay_out(config(vllm=vllm), 1, has_frozen=False).is_colocated
    with pytest.raises(SettingError, match=r"got placement\.trainer=apart"):
        lay_out(config(vllm=vllm), 2, has_frozen=False)


def test_a_seat_crosses_processes() -> None:
    seat = Seat(group="a", place=Place(bundle=1, num_gpus=0.5))
    assert pickle.loads(pickle.dumps(seat)) == seat
