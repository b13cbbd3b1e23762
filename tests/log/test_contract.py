"""What every storage profile must hold: the same tests for disk, memory, network file system and object store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from molt.errors import ConflictingAppendError, FencedError, LeaseHeldError, LogError
from molt.log.export import export_log
from molt.log.fsck import fsck
from molt.log.heal import manifest_name, manifests
from molt.log.pin import create_pin, verify_pin
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.retention import redact_rollout
from molt.log.rows import Payload
from molt.log.seal import seal_log
from molt.log.store import Store
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_message, make_segment, segment_id

Place = tuple[str, Store]


def opened(place: Place, attempt: int = 1, *, steal: bool = False) -> LogWriter:
    address, store = place
    return LogWriter.open(address, run="run", attempt=attempt, store=store, steal=steal)


def test_rows_come_back_as_sent_in_one_dense_order(place: Place) -> None:
    with opened(place) as writer:
        producer = Producer(writer, "worker")
        for index in range(3):
            producer.append_sync(segments=[make_segment(index)], events=[make_fact(index)])
        cut = LogReader.open(place[0]).cut()
        lsn = sorted(cut.table("segments", ["lsn"])["lsn"].to_pylist() + cut.table("events", ["lsn"])["lsn"].to_pylist())
        assert lsn == [0, 1, 2, 3, 4, 5]  # three messages of two rows
        batch = cut.segments([segment_id(2), segment_id(0)])
        assert batch.token_ids_T.tolist() == [200, 201, 202, 203, 204, 0, 1, 2, 3, 4]
        assert batch.offsets_S.tolist() == [0, 5, 10]


def test_reopened_log_goes_on_where_it_ended(place: Place) -> None:
    with opened(place) as writer:
        Producer(writer, "worker").append_sync(segments=[make_segment(0)])
    with opened(place) as writer:
        assert writer.lsn_end == 0
        Producer(writer, "worker").append_sync(segments=[make_segment(1)])
    assert LogReader.open(place[0]).cut().table("segments", ["lsn"])["lsn"].to_pylist() == [0, 1]


def test_retried_append_is_not_counted_twice(place: Place) -> None:
    message = make_message("worker", 0, [0, 1], facts=[7])
    with opened(place) as writer:
        first = writer.submit(message).result(10)
        again = writer.submit(message).result(10)
    with opened(place) as writer:
        after_restart = writer.submit(message).result(10)
    assert (first.is_repetition, again.is_repetition, after_restart.is_repetition) == (False, True, True)
    cut = LogReader.open(place[0]).cut()
    assert cut.table("segments").num_rows == 2
    assert cut.table("events").num_rows == 1


def test_another_payload_under_a_known_place_is_an_error(place: Place) -> None:
    with opened(place) as writer:
        writer.submit(make_message("worker", 0, [0])).result(10)
        with pytest.raises(ConflictingAppendError, match="seq=0"):
            writer.submit(make_message("worker", 0, [1])).result(10)


def test_messages_out_of_order_are_committed_in_order(place: Place) -> None:
    with opened(place) as writer:
        futures = [writer.submit(make_message("worker", seq, [seq])) for seq in (2, 1, 0)]
        for future in futures:
            future.result(10)
    assert LogReader.open(place[0]).cut().table("segments", ["seq"])["seq"].to_pylist() == [0, 1, 2]


def test_second_writer_is_refused_with_the_name_of_the_first(place: Place) -> None:
    with opened(place), pytest.raises(LeaseHeldError, match="process"):
        opened(place)


def test_replaced_writer_is_fenced_at_its_next_commit(place: Place) -> None:
    zombie = opened(place)
    zombie.submit(make_message("worker", 0, [0])).result(10)
    with opened(place, steal=True) as writer:
        with pytest.raises(FencedError):
            zombie.submit(make_message("worker", 1, [1])).result(10)
        writer.submit(make_message("worker", 1, [2])).result(10)
    zombie.close()
    assert LogReader.open(place[0]).cut().table("segments", ["prompt_index"])["prompt_index"].to_pylist() == [0, 2]


def test_late_message_of_an_earlier_attempt_is_refused(place: Place) -> None:
    with opened(place, attempt=1) as writer:
        writer.submit(make_message("worker", 0, [0])).result(10)
    with opened(place, attempt=2) as writer, pytest.raises(FencedError, match="attempt=1 is over"):
        writer.submit(make_message("worker", 1, [1], attempt=1)).result(10)
    with pytest.raises(FencedError, match="attempt=1 is over"):
        opened(place, attempt=1)


def test_cut_keeps_its_rows_while_the_log_grows(place: Place) -> None:
    with opened(place) as writer:
        producer = Producer(writer, "worker")
        producer.append_sync(segments=[make_segment(0)], events=[make_fact(0)])
        reader = LogReader.open(place[0])
        cut = reader.cut()
        producer.append_sync(segments=[make_segment(1)], events=[make_fact(1)])
        assert cut.lsn == 1
        assert cut.table("segments").num_rows == 1
        assert reader.cut().lsn == 3
        assert reader.cut(at=1).table("events").num_rows == 1
        assert (reader.cut(at=2).lsn, reader.cut(at=0).lsn) == (1, -1)  # half of a message is no state that the log was in
        with pytest.raises(LogError, match="at=9"):
            reader.cut(at=9)


def test_tail_gives_each_row_once_in_order(place: Place) -> None:
    with opened(place) as writer:
        producer = Producer(writer, "worker")
        reader = LogReader.open(place[0])
        tail = reader.tail("segments", ["segment_id"])
        seen = []
        for index in range(4):
            producer.append_sync(segments=[make_segment(index)], events=[make_fact(index)])
            seen += tail.poll()["segment_id"].to_pylist()
            assert tail.poll().num_rows == 0
        assert seen == [segment_id(index) for index in range(4)]
        assert reader.tail("segments", ["segment_id"], after=2).poll()["segment_id"].to_pylist() == [segment_id(2), segment_id(3)]


def test_duckdb_reads_a_cut(place: Place) -> None:
    with opened(place) as writer:
        Producer(writer, "worker").append_sync(segments=[make_segment(0), make_segment(1, sampled=4)], events=[make_fact(5)])
        with LogReader.open(place[0]).cut().connect() as connection:
            # 2 + 3 and 2 + 4 tokens
            assert connection.sql("select sum(n_tokens), sum(n_sampled) from segments").fetchall() == [(11, 7)]
            assert connection.sql("select kind, step from events").fetchall() == [("step_refused", 5)]
            assert connection.sql("select count(*) from consumption").fetchall() == [(0,)]


def test_payload_is_stored_once_for_all_rollouts_of_a_group(place: Place) -> None:
    blob = Payload(kind="image", data=b"pixels" * 100)
    with opened(place) as writer:
        producer = Producer(writer, "worker")
        producer.append_sync(segments=[make_segment(0)], payloads=[blob, blob])
        producer.append_sync(payloads=[blob])
    with opened(place) as writer:
        Producer(writer, "worker").append_sync(payloads=[blob, Payload(kind="image", data=b"")])
    cut = LogReader.open(place[0]).cut()
    assert cut.table("payloads", ["size_bytes"])["size_bytes"].to_pylist() == [600, 0]
    assert cut.table("payloads", ["data"])["data"].to_pylist() == [b"pixels" * 100, b""]


async def test_many_appends_at_once_are_each_acknowledged_in_order(place: Place) -> None:
    with opened(place) as writer:
        producer = Producer(writer, "worker")
        acks = await asyncio.gather(*(producer.append(segments=[make_segment(index)]) for index in range(20)))
        assert [ack.seq for ack in acks] == list(range(20))
        table = LogReader.open(place[0]).cut().table("segments", ["prompt_index"])
        assert table["prompt_index"].to_pylist() == list(range(20))


def test_log_is_looked_after_on_every_profile(place: Place, tmp_path: Path) -> None:
    address, _ = place
    payloads = [Payload(kind="routing", data=bytes([index]) * 5000, shape=(5000,), dtype="|u1") for index in range(3)]
    with opened(place) as writer:
        producer = Producer(writer, "worker")
        for index, payload in enumerate(payloads):
            producer.append_sync(segments=[make_segment(index, routing_digest=payload.payload_digest)], payloads=[payload])
        assert create_pin(address, "whole").lsn == 5
        seal = writer.between_commits(seal_log).result(60)
        assert (seal.lsn_end, seal.num_rows["segments"]) == (5, 3)
        assert verify_log(address).findings == []
        redacted = writer.between_commits(lambda core: redact_rollout(core, "e0-p1/0/0", reason="asked")).result(60)
        assert [(item.table, item.num_rows) for item in redacted] == [("segments", 1), ("scores", 0), ("payloads", 1)]
        assert verify_log(address).findings == []
        assert verify_pin(address, "whole") == []
    cut = LogReader.open(address).cut()
    assert cut.payload(payloads[2].payload_digest).data == payloads[2].data
    made = export_log(address, tmp_path / "export")
    assert made.tables["segments"]["rows"] == 3
    assert made.root == verify_log(address).root


def test_damage_is_repaired_where_there_are_files(place: Place) -> None:
    address, store = place
    if store.place == "memory":
        pytest.skip("the memory profile has no files to damage")
    with opened(place) as writer:
        for index in range(3):
            writer.submit(make_message("worker", index, [index])).result(20)
    home = LogReader.open(address).home
    newest = manifests(home, "segments")[0]
    name = manifest_name("segments", newest)
    home.write(name, (home.read(name) or b"")[:100])
    assert not fsck(address).is_clean
    with opened(place) as writer:
        assert writer.submit(make_message("worker", 2, [2])).result(20).is_repetition  # the lost commit was made again
    assert fsck(address).is_clean
    assert LogReader.open(address).cut().table("segments", ["prompt_index"])["prompt_index"].to_pylist() == [0, 1, 2]
