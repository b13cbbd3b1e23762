"""The way of finished rollouts into a real log: what ends together travels together, and a broken row takes no other rollout with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from molt.errors import DataError, LogError
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
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
