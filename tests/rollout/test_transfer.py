"""Broadcasts before anything moves: the port is held, the group is of exactly these engines, and the same weights can go to others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from molt.errors import RefitError
from molt.rollout.transfer import NcclSender
from molt.rollout.weights import facts_of

HOST = "127.0.0.1"


def sender(*engines: str, gpus_per_engine: int = 1) -> NcclSender:
    return NcclSender(engines, gpus_per_engine=gpus_per_engine, host=HOST, limit_s=10.0)


def test_nobody_takes_the_port_between_its_choice_and_the_meeting() -> None:
    one = sender("e0")
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(one.place)
    one.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(one.place)


def test_every_worker_of_every_engine_has_a_place_of_its_own() -> None:
    one = sender("e0", "e1", gpus_per_engine=2)
    source = one.source(facts_of([("a", torch.ones(3))]), policy_version=4)
    init = json.loads(source.options["init"])
    # rank 0 is the trainer, 1 and 2 are the workers of e0, 3 and 4 those of e1
    assert one.world_size == 5 and [init[name]["rank_offset"] for name in ("e0", "e1")] == [1, 3]
    assert source.reaches == {"e0", "e1"} and int(source.options["size_bytes"]) == 12
    one.close()


def test_the_same_version_can_go_to_other_engines() -> None:
    one, two = sender("e0"), sender("e0+1")
    first = one.source(facts_of([("a", torch.arange(4.0))]), policy_version=7)
    again = one.source_by(two)
    assert (again.policy_version, again.digests) == (7, first.digests) and again.reaches == {"e0+1"}
    assert json.loads(again.options["init"])["e0+1"]["master_port"] == two.place[1] != one.place[1]
    one.close()
    two.close()


class Deaf(NcclSender):
    """A broadcast that takes two tensors and ends, as with an engine that died."""

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]], device: int) -> None:
        assert [next(tensors)[0], next(tensors)[0]] == ["t0", "t1"]
        raise ConnectionError("the engine is gone")


def test_tensors_are_taken_to_their_end_though_the_broadcast_broke_off() -> None:
    one, made = Deaf(["e0"], gpus_per_engine=1, host=HOST, limit_s=10.0), []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(100):
            made.append(number)
            yield f"t{number}", torch.zeros(1)

    with pytest.raises(RefitError, match="broke off: ConnectionError: the engine is gone"):
        one.send(tensors())
    assert len(made) == 100  # other ranks take part in making each, and none of them may wait in vain


def test_few_tensors_are_made_ahead_of_a_slow_broadcast() -> None:
    made, ahead = [], []

    class Slow(NcclSender):
        """A broadcast that takes its time with each tensor."""

        def _send(self, tensors: Iterator[tuple[str, torch.Tensor]], device: int) -> None:
            for number, _ in enumerate(tensors):
                time.sleep(0.005)
                ahead.append(len(made) - number)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(100):
            made.append(number)
            yield f"t{number}", torch.zeros(1)

    one = Slow(["e0"], gpus_per_engine=1, host=HOST, limit_s=10.0)
    one.send(tensors())
    one.close()
    assert len(ahead) == 100 and 1 < max(ahead) <= 19  # 16 wait, one is in hand on either side, one is being made


@pytest.mark.vllm
def test_engines_meet_the_trainer_over_the_held_port() -> None:
    from vllm.distributed.utils import StatelessProcessGroup

    one = sender("e0")
    heard: list[Any] = []

    def engine() -> None:
        group = StatelessProcessGroup.create(*one.place, 1, one.world_size, store_timeout=10)
        heard.append(group.broadcast_obj(None, src=0))

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    group = one.meet()
    group.broadcast_obj("an id", src=0)
    thread.join(10.0)
    assert heard == ["an id"]
