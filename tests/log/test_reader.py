"""Reading: batches without padding, row checks, tails across compaction, cuts across half a group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from molt.errors import CorruptLogError, LogError
from molt.log.cut import cut_point
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Payload, Span, TokenSource
from molt.log.stamp import Stamp
from molt.log.store import Store
from molt.log.upkeep import Upkeep
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_message, make_segment, segment_id

Fast = Callable[..., Store]
SPANS = [
    Span(len=2, source=TokenSource.SYSTEM),
    Span(len=1, source=TokenSource.POLICY, trainable=True, policy_version=3, kv_version=2, turn=0),
    Span(len=1, source=TokenSource.TOOL, turn=0),
    Span(len=1, source=TokenSource.POLICY, trainable=False, policy_version=4, kv_version=3, turn=1),
]


def test_dense_columns_follow_from_spans(run_dir: Path, fast: Fast) -> None:
    logprobs = np.array([np.nan, np.nan, -1, np.nan, -2], np.float32)
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(0, spans=SPANS, behaviour_logprobs=logprobs)])
        batch = LogReader.open(run_dir).cut().segments([segment_id(0)])
    assert [source for source in batch.source_T] == [0, 0, 5, 2, 5]  # places of system, policy, tool in TokenSource
    assert batch.is_trainable_T.tolist() == [False, False, True, False, False]
    assert batch.is_sampled_T.tolist() == [False, False, True, False, True]
    assert batch.policy_version_T.tolist() == [-1, -1, 3, -1, 4]
    assert batch.kv_version_T.tolist() == [-1, -1, 2, -1, 3]
    assert batch.turn_T.tolist() == [0, 0, 0, 0, 1]
    assert np.isnan(batch.behaviour_logprobs_T).tolist() == [True, True, False, True, False]
    assert batch.token_ids_T.dtype == np.int32
    assert batch.behaviour_logprobs_T.dtype == np.float32
    assert batch.column("n_sampled").to_pylist() == [2]


def test_token_ids_are_a_view_of_arrow_memory(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(index) for index in range(4)])
        batch = LogReader.open(run_dir).cut().segments([segment_id(index) for index in range(4)])
    assert not batch.token_ids_T.flags.owndata
    assert batch.lengths_S.tolist() == [5, 5, 5, 5]
    assert batch.segment_T.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5


def test_all_segments_come_in_bounded_batches(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(index) for index in range(6)])
        cut = LogReader.open(run_dir).cut()
        assert sum(len(batch) for batch in cut.batches()) == 6
        assert [len(batch) for batch in cut.batches(where="prompt_index >= 4")] == [2]


def test_segment_that_is_not_there_is_named(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(0)])
        with pytest.raises(LogError, match="segment_id=e0-p9/0/0/0"):
            LogReader.open(run_dir).cut().segments([segment_id(0), segment_id(9)])


def test_segment_that_came_after_the_cut_is_not_in_it(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        producer.append_sync(segments=[make_segment(0)])
        reader = LogReader.open(run_dir)
        old = reader.cut()
        producer.append_sync(segments=[make_segment(1)])
        assert len(reader.cut().segments([segment_id(1)])) == 1
        with pytest.raises(LogError, match="not in the log up to lsn 0"):
            old.segments([segment_id(1)])


def test_unknown_table_and_missing_log_are_named(run_dir: Path, fast: Fast) -> None:
    with pytest.raises(LogError, match="no log there"):
        LogReader.open(run_dir)
    LogWriter.open(run_dir, run="run", store=fast("process")).close()
    with pytest.raises(LogError, match="table='turns'"):
        LogReader.open(run_dir).cut().table("turns")


def test_tail_and_cut_survive_compaction_and_clean_up(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        reader = LogReader.open(run_dir)
        tail, seen = reader.tail("segments", ["prompt_index"]), []
        for index in range(5):
            producer.append_sync(segments=[make_segment(index)])
        seen += tail.poll()["prompt_index"].to_pylist()
        old = reader.cut()

        def squeeze(core: object) -> None:
            upkeep = Upkeep(core)  # type: ignore[arg-type]
            for table in upkeep._core.tables.values():
                upkeep.compact(table, is_full=True)
                upkeep.clean_up(table, keep=1)

        writer.between_commits(squeeze).result(20)
        producer.append_sync(segments=[make_segment(5)])
        seen += tail.poll()["prompt_index"].to_pylist()
        assert seen == [0, 1, 2, 3, 4, 5]
        assert old.table("segments", ["prompt_index"])["prompt_index"].to_pylist() == [0, 1, 2, 3, 4]
        assert old.segments([segment_id(4)]).token_ids_T.tolist() == [400, 401, 402, 403, 404]


def test_open_duckdb_connection_keeps_its_version_from_clean_up(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        for index in range(4):
            producer.append_sync(segments=[make_segment(index)])
        connection = LogReader.open(run_dir).cut().connect()
        producer.append_sync(segments=[make_segment(4)])

        def squeeze(core: object) -> int:
            upkeep = Upkeep(core)  # type: ignore[arg-type]
            table = upkeep._core.tables["segments"]
            upkeep.compact(table, is_full=True)
            return upkeep.clean_up(table, keep=1)

        assert writer.between_commits(squeeze).result(20) > 0
        assert connection.sql("select count(*), sum(n_tokens) from segments").fetchall() == [(4, 20)]
        connection.close()


def test_queries_that_spill_do_so_apart_and_not_where_they_were_called(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million pairs of numbers, 32 MB, are sorted by connections that may hold 20."""
    LogWriter.open(run_dir, run="run", store=fast("process")).close()
    monkeypatch.chdir(run_dir)
    before = set(run_dir.iterdir())
    folders = set()
    for _ in range(2):
        connection = LogReader.open(run_dir).cut().connect()
        folder = Path(str(connection.sql("select current_setting('temp_directory')").fetchall()[0][0]))
        connection.execute("set threads = 1; set memory_limit = '20MB'")
        rows = connection.execute("create temp table pairs as select i, -i as j from range(2000000) t(i) order by j").execute("from pairs")
        assert rows.fetchone() == (1_999_999, -1_999_999) and folder.is_dir()
        assert set(run_dir.iterdir()) == before
        connection.close()
        assert not folder.exists()
        folders.add(folder)
    assert len(folders) == 2


def stamp(group: int, *, start: int, end: int, intent: tuple[str, ...] = (), is_head: bool = False) -> Stamp:
    return Stamp(
        kind="group",
        epoch=1,
        attempt=1,
        group=group,
        lsn_start=start,
        lsn_end=end,
        rows_end=0,
        marks={} if is_head else None,
        intent={name: {} for name in intent} if is_head else None,
    )


def test_cut_ends_before_a_group_that_is_half_committed() -> None:
    head = stamp(5, start=10, end=19, intent=("segments", "events"), is_head=True)
    stamps = {"segments": head, "events": stamp(4, start=8, end=9)}
    assert cut_point(stamps, {"segments": 5, "events": 4}) == 9
    assert cut_point(stamps, {"segments": 5, "events": 5}) == 19  # events arrived before the versions were opened
    assert cut_point(stamps, {"segments": 6, "events": 6}) == 19  # a later group is not part of this cut


def test_payload_is_read_whole_and_in_part(run_dir: Path, fast: Fast) -> None:
    array = np.arange(50_000, dtype=np.int16).reshape(100, 500)
    payload = Payload.of_array("routing", array)
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(payloads=[payload, Payload(kind="image", data=b"png")])
        cut = LogReader.open(run_dir).cut()
        assert (cut.payload(payload.payload_digest).to_array() == array).all()
        assert np.frombuffer(cut.payload_range(payload.payload_digest, 2000, 8), np.int16).tolist() == [1000, 1001, 1002, 1003]
        with pytest.raises(LogError, match="no such payload"):
            cut.payload("0" * 32)
        with pytest.raises(LogError, match="hex digits"):
            cut.payload("' or true --")


def test_flipped_token_is_refused_with_file_and_row(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        writer.submit(make_message("p", 0, [7])).result(10)
    path = next((run_dir / "log" / "segments.lance" / "data").glob("*.lance"))
    content = path.read_bytes()
    place = content.index(np.arange(700, 705, dtype=np.int32).tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(CorruptLogError, match=r"segments\.lance.*lsn 0"):
        LogReader.open(run_dir).cut().segments([segment_id(7)])


def test_log_opens_in_plain_lance_and_duckdb(run_dir: Path, fast: Fast) -> None:
    import duckdb
    import lance

    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(0)], events=[make_fact(3)])
    segments = lance.dataset(str(run_dir / "log" / "segments.lance"))
    assert duckdb.sql("select sum(len(token_ids)) from segments").fetchall() == [(5,)]
    assert segments.to_table(columns=["token_ids"])["token_ids"].to_pylist() == [[0, 1, 2, 3, 4]]


def test_reader_imports_neither_torch_nor_ray() -> None:
    import subprocess

    names = "molt.log.reader, molt.log.writer, molt.log.fsck, molt.log.export, molt.log.retention"
    code = f"import sys; import {names}; print({{'torch', 'ray', 'vllm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert done.stdout.strip() == "set()"
