"""The way of finished rollouts into a real log: what ends together travels together, and a broken row takes no other rollout with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from molt.errors import DataError, LogError
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Payload
from molt.log.writer import LogWriter
from molt.rollout import outbox as outbox_module
from molt.rollout.outbox import Outbox
from tests.log.build import make_segment, segment_id


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process") as writer:
        yield writer


def messages(tmp_path: Path) -> dict[int, list[str]]:
    """Segments of each message in the log."""
    found: dict[int, list[str]] = {}
    for row in LogReader.open(tmp_path / "run").cut().table("segments", ["seq", "segment_id"]).to_pylist():
        found.setdefault(row["seq"], []).append(row["segment_id"])
    return found


async def test_rollouts_that_end_together_travel_in_one_message_and_a_later_one_in_the_next(tmp_path: Path, writer: LogWriter) -> None:
    outbox = Outbox(Producer(writer, "worker"))
    await asyncio.gather(*(outbox.append([make_segment(index)], []) for index in range(3)))
    await outbox.append([make_segment(3)], [])
    assert messages(tmp_path) == {0: [segment_id(0), segment_id(1), segment_id(2)], 1: [segment_id(3)]}


async def test_a_row_that_breaks_a_rule_fails_its_own_rollout_only(tmp_path: Path, writer: LogWriter) -> None:
    outbox = Outbox(Producer(writer, "worker"))
    broken = make_segment(1, purpose="play")  # the table knows train, eval and sft
    ends = await asyncio.gather(
        outbox.append([make_segment(0)], []), outbox.append([broken], []), outbox.append([make_segment(2)], []), return_exceptions=True
    )
    assert ends[0] is None and isinstance(ends[1], DataError) and ends[2] is None
    assert messages(tmp_path) == {0: [segment_id(0)], 1: [segment_id(2)]}


async def test_a_cancelled_rollout_leaves_the_others_of_its_message_alone(tmp_path: Path, writer: LogWriter) -> None:
    outbox = Outbox(Producer(writer, "worker"))
    first = asyncio.create_task(outbox.append([make_segment(0)], []))
    second = asyncio.create_task(outbox.append([make_segment(1)], []))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert first.cancelled() and segment_id(1) in messages(tmp_path)[0]


async def test_a_log_that_takes_nothing_is_told_to_every_rollout_of_the_message(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process")
    writer.close()
    outbox = Outbox(Producer(writer, "worker", num_tries=1))
    ends = await asyncio.gather(*(outbox.append([make_segment(index)], []) for index in range(2)), return_exceptions=True)
    assert [type(end) for end in ends] == [LogError, LogError]


def tensor(value: int, size: int) -> Payload:
    return Payload.of_array("tensor", np.full(size, value, np.uint8))


async def test_a_payload_that_is_in_the_log_is_not_sent_again(tmp_path: Path, writer: LogWriter) -> None:
    sent: list[int] = []

    class Counting(Producer):
        async def append(self, **rows):  # type: ignore[no-untyped-def]
            sent.append(len(rows["payloads"]))
            return await super().append(**rows)

    outbox = Outbox(Counting(writer, "worker"))
    # Two members of a group show one picture; a later rollout shows it too, and one of its own.
    await asyncio.gather(*(outbox.append([make_segment(index)], [tensor(1, 10)]) for index in range(2)))
    await outbox.append([make_segment(2)], [tensor(1, 10), tensor(2, 10)])
    assert sent == [1, 1]
    assert LogReader.open(tmp_path / "run").cut().table("payloads", ["size_bytes"])["size_bytes"].to_pylist() == [10, 10]


async def test_large_payloads_wait_for_each_other(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MOST_BYTES", 100)
    monkeypatch.setattr(outbox_module, "GATHER_S", 0.0)  # each in a message of its own
    under_way, most = 0, 0

    class Slow(Producer):
        async def append(self, **rows):  # type: ignore[no-untyped-def]
            nonlocal under_way, most
            under_way += sum(payload.size_bytes for payload in rows["payloads"])
            most = max(most, under_way)
            await asyncio.sleep(0.05)
            ack = await super().append(**rows)
            under_way -= sum(payload.size_bytes for payload in rows["payloads"])
            return ack

    outbox = Outbox(Slow(writer, "worker"))

    async def later(index: int, size: int) -> None:
        await asyncio.sleep(0.01 * index)
        await outbox.append([make_segment(index)], [tensor(index, size)])

    # 60 + 60 do not travel together; 300 alone is more than the limit and still travels.
    await asyncio.gather(*(later(index, size) for index, size in enumerate((60, 60, 300, 30))))
    assert most == 300
