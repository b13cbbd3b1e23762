"""The writer as a Ray actor: several processes append, the actor dies, every row is there once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from molt.errors import ConflictingAppendError, LeaseHeldError, LogError  # noqa: E402
from molt.log.actor import RaySink, actor_name, start_log_actor, stop_log_actor  # noqa: E402
from molt.log.message import Message  # noqa: E402
from molt.log.producer import Producer  # noqa: E402
from molt.log.reader import LogReader  # noqa: E402
from molt.log.seal import read_seal  # noqa: E402
from molt.log.verify import verify_log  # noqa: E402
from molt.log.writer import LogWriter  # noqa: E402
from tests.log.build import make_message, make_segment  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local cluster of two processes."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": "."}})
    yield
    ray.shutdown()


class Sender:
    """A process that appends segments as fast as they are acknowledged."""

    async def send(self, sink: RaySink, start: int, count: int) -> int:
        producer = Producer(sink, "worker", is_validating=False)
        acks = await asyncio.gather(*(producer.append(segments=[make_segment(start + number)]) for number in range(count)))
        return len(acks)


def test_rows_of_two_processes_survive_the_death_of_the_actor(cluster: None, tmp_path: Path) -> None:
    handle = start_log_actor(tmp_path, run="deadly", store="durable")
    assert ray.get_actor(actor_name("deadly")) is not None
    sink = RaySink(handle)
    senders = [ray.remote(Sender).remote() for _ in range(2)]
    sent = [sender.send.remote(sink, 1000 * place, 150) for place, sender in enumerate(senders)]
    time.sleep(0.5)
    ray.kill(handle, no_restart=False)
    assert ray.get(sent, timeout=120) == [150, 150]
    stop_log_actor(handle, is_sealing=True)
    rows = LogReader.open(tmp_path).cut().table("segments", ["prompt_index"])["prompt_index"].to_pylist()
    assert sorted(rows) == [*range(150), *range(1000, 1150)]
    assert read_seal(LogReader.open(tmp_path).home) is not None
    assert verify_log(tmp_path).findings == []


def test_what_is_asked_while_the_actor_is_started_anew_waits_for_it(cluster: None, tmp_path: Path) -> None:
    handle = start_log_actor(tmp_path, run="asked", store="process")
    sink = RaySink(handle)
    Producer(sink, "worker", is_validating=False).append_sync(segments=[make_segment(1)])
    ray.kill(handle, no_restart=False)
    sink.flush()
    ray.kill(handle, no_restart=False)
    assert RaySink(handle).run == "asked"
    ray.kill(handle, no_restart=False)
    stop_log_actor(handle, is_sealing=True)
    assert read_seal(LogReader.open(tmp_path).home) is not None


def test_an_actor_that_never_comes_back_is_told(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = start_log_actor(tmp_path, run="gone", store="process")
    sink = RaySink(handle)
    ray.kill(handle, no_restart=True)
    with pytest.raises(ray.exceptions.RayActorError):
        while ray.get(handle.lsn_end.remote(), timeout=60) >= 0:
            time.sleep(0.05)
    monkeypatch.setattr("molt.log.actor.CALL_LIMIT_S", 1.0)
    with pytest.raises(LogError, match="the log actor was away for 1 s"):
        sink.flush()


def test_errors_of_the_writer_arrive_with_their_type(cluster: None, tmp_path: Path) -> None:
    handle = start_log_actor(tmp_path, run="typed", store="process")
    sink = RaySink(handle)
    assert sink.submit(make_typed(0)).result(20).seq == 0
    with pytest.raises(ConflictingAppendError, match="seq=0"):
        sink.submit(make_typed(9)).result(20)
    stop_log_actor(handle)


def make_typed(index: int) -> Message:
    """A message under one and the same place."""
    return make_message("p", 0, [index])


def test_log_that_cannot_be_opened_is_refused_with_its_own_error(cluster: None, tmp_path: Path) -> None:
    with LogWriter.open(tmp_path, run="held", store="durable"), pytest.raises(LeaseHeldError, match=str(tmp_path)):
        start_log_actor(tmp_path, run="held", store="durable")


def test_folder_that_was_renamed_goes_on_under_the_name_of_its_log(cluster: None, tmp_path: Path) -> None:
    LogWriter.open(tmp_path, run="before", store="durable").close()
    handle = start_log_actor(tmp_path, run="after", attempt=2, store="durable")
    sink = RaySink(handle)
    assert (sink.run, sink.attempt) == ("before", 2)
    stop_log_actor(handle)
