"""What the pinned versions of Lance, Arrow and DuckDB must do for the log to be right: public failures as regressions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import duckdb
import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from lance.dataset import LanceOperation, Transaction
from lance.fragment import write_fragments

from molt.errors import LogError
from molt.log.core import existing_core
from molt.log.export import export_log, import_log, sorted_batches
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.retention import redact_rollout
from molt.log.rows import Payload
from molt.log.store import Store
from molt.log.table import FORMAT
from molt.log.upkeep import Upkeep, referenced_files
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_message, make_segment, segment_id

Fast = Callable[..., Store]


def stored(folder: Path, table: pa.Table) -> lance.LanceDataset:
    return lance.write_dataset(table, folder / "t.lance", data_storage_version=FORMAT)


def test_one_very_long_list_among_empty_ones(tmp_path: Path) -> None:
    lengths = np.zeros(50_000, np.int64)
    lengths[31_000] = 50_000
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.arange(50_000, dtype=np.int32)))
    table = pa.table({"ids": ids, "n": pa.array(lengths)})
    dataset = stored(tmp_path, table)
    assert dataset.to_table().equals(table)
    # 0 + 1 + ... + 49,999
    assert duckdb.sql("select sum(list_sum(ids)), sum(n) from dataset").fetchall() == [(1_249_975_000, 50_000)]


def test_one_long_segment_among_short_ones_goes_through_the_log(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        producer.append_sync(segments=[make_segment(index, prompt=1, sampled=2) for index in range(2000)])
        producer.append_sync(segments=[make_segment(2000, prompt=100_000, sampled=200_000)])
        batch = LogReader.open(run_dir).cut().segments([segment_id(2000), segment_id(3)])
    assert batch.lengths_S.tolist() == [300_000, 3]
    assert int(batch.token_ids_T[299_999]) == 299_999 + 200_000


def test_three_states_of_a_list_stay_three(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([None, [1, 2, 3], []], pa.list_(pa.int32()))})
    dataset = stored(tmp_path, table)
    assert dataset.to_table()["x"].to_pylist() == [None, [1, 2, 3], []]
    assert duckdb.sql("select x from dataset").fetchall() == [(None,), ([1, 2, 3],), ([],)]


def test_nulls_inside_nested_columns_over_two_fragments(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("len", pa.int32()), ("source", pa.string())]))
    rows = [[{"len": 1, "source": "a"}, None, {"len": None, "source": None}], [], None]
    first, second = pa.table({"s": pa.array(rows, kind)}), pa.table({"s": pa.array([[{"len": 2, "source": "b"}]], kind)})
    stored(tmp_path, first)
    dataset = lance.write_dataset(second, tmp_path / "t.lance", mode="append", data_storage_version=FORMAT)
    assert dataset.to_table()["s"].to_pylist() == [*rows, [{"len": 2, "source": "b"}]]


def test_empty_blob_does_not_shift_its_neighbours(run_dir: Path, fast: Fast) -> None:
    blobs = [Payload(kind="image", data=data) for data in (b"B", b"", b"CC", b"d" * 100_000)]
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(payloads=blobs)
        cut = LogReader.open(run_dir).cut()
        assert [payload.data for payload in cut.payloads([blob.payload_digest for blob in blobs])] == [blob.data for blob in blobs]


def test_struct_column_is_aligned_past_two_to_the_seventeenth_row(tmp_path: Path) -> None:
    numbers = pa.array(np.arange(131_075, dtype=np.int64))
    rows = pa.table({"a": numbers, "s": pa.StructArray.from_arrays([numbers], ["a"])})
    dataset = stored(tmp_path, rows)
    assert dataset.count_rows() == 131_075
    assert duckdb.sql("select count(*) from dataset where a <> s.a").fetchall() == [(0,)]
    assert duckdb.sql("select count(*) from rows where a <> s.a").fetchall() == [(0,)]


def test_boolean_lists_survive_slices(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    rows = [None if n == 9 else [bool(bit) for bit in chance.integers(0, 2, n)] for n in (0, 1, 7, 8, 9, 63, 64, 65, 1000)]
    whole = pa.table({"m": pa.array(rows, pa.list_(pa.bool_()))})
    part = whole.slice(3)
    dataset = stored(tmp_path, part)
    assert dataset.to_table()["m"].to_pylist() == rows[3:]
    assert dataset.take([5, 1])["m"].to_pylist() == [rows[8], rows[4]]
    assert duckdb.sql("select m from dataset").fetchall() == [(row,) for row in rows[3:]]
    assert pc.fill_null(part["m"].combine_chunks().flatten(), False).to_pylist() == [bit for row in rows[3:] if row for bit in row]


def test_order_of_events_does_not_depend_on_a_time_zone(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(events=[make_fact(number) for number in (3, 1, 2)])
    kinds = {field.type for name in ("segments", "events", "scores") for field in LogReader.open(run_dir).newest(name).schema}
    assert not any(pa.types.is_temporal(kind) for kind in kinds)
    assert LogReader.open(run_dir).cut().table("events", ["step"])["step"].to_pylist() == [3, 1, 2]


@pytest.mark.slow
def test_eight_hundred_appends_leave_few_versions_and_small_manifests(run_dir: Path, fast: Fast) -> None:
    message = [make_message("p", seq, [seq]) for seq in range(800)]
    store = fast("process", max_rows=1)
    store = store.model_copy(update={"upkeep": store.upkeep.model_copy(update={"grace_s": 0.0})})
    with LogWriter.open(run_dir, run="run", store=store) as writer:
        for future in [writer.submit(item) for item in message]:
            future.result(60)
    home = LogReader.open(run_dir).home
    sizes = home.sizes("segments")
    assert sum(1 for name in sizes if name.startswith("_versions/")) <= 2 * 32 + 8
    assert len(LogReader.open(run_dir).newest("segments").get_fragments()) <= 64 + 16
    assert verify_log(run_dir).is_clean


def test_commit_on_an_old_version_is_refused_by_the_log_though_lance_rebases_it(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        table = writer._core.tables["events"]
        rows = make_message("x", 0, [], facts=[0]).tables["events"]
        lsn = rows.append_column("lsn", pa.array([0], pa.int64())).select(table.dataset.schema.names)
        behind = lance.dataset(table.uri)
        writer.submit(make_message("p", 0, [], facts=[1])).result(10)
        fragments = write_fragments(pa.Table.from_batches([lsn]), behind, data_storage_version=FORMAT)
        lance.LanceDataset.commit(behind, Transaction(behind.version, LanceOperation.Append(fragments)))  # a stranger: Lance lets it in
        with pytest.raises(LogError, match="another writer took the run"):
            writer.submit(make_message("p", 1, [], facts=[2])).result(10)


def test_after_clean_up_every_kept_version_reads_and_no_file_is_stranded(run_dir: Path, fast: Fast) -> None:
    from molt.log.pin import create_pin

    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        for index in range(6):
            producer.append_sync(segments=[make_segment(index)])
            if index == 2:
                create_pin(run_dir, "middle")
    with existing_core(run_dir) as core:
        upkeep, table = Upkeep(core), core.tables["segments"]
        upkeep.compact(table, is_full=True)
        upkeep.clean_up(table, keep=1)
        for version in (item["version"] for item in table.dataset.versions()):
            table.dataset.checkout_version(version).to_table()
        there = {name.split("/")[1].removesuffix(".lance") for name in core.home.sizes("segments") if name.startswith("data/")}
        assert there == referenced_files(table)


@pytest.mark.slow
def test_compaction_memory_is_bounded_by_bytes_not_by_the_table(run_dir: Path, fast: Fast) -> None:
    import resource

    store = fast("process")
    store = store.model_copy(update={"upkeep": store.upkeep.model_copy(update={"max_fragments": 4, "target_bytes": 8 << 20})})
    chance = np.random.default_rng(0)
    with LogWriter.open(run_dir, run="run", store=store) as writer:
        producer = Producer(writer, "p")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for index in range(60):
            blob = Payload(kind="tensor", data=chance.bytes(5 << 20), shape=(5 << 20,), dtype="|u1")
            producer.append_sync(payloads=[blob], segments=[make_segment(index)])
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 240  # 300 MiB went through


def test_rows_that_were_rewritten_are_exported_in_order_and_a_bounded_number_of_bytes_at_a_time(
    run_dir: Path, tmp_path: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 segments of 50 tokens, 8 bytes each, and one of 3,000 a portion of 4,000 bytes holds ten, and the long one alone."""
    images = [Payload(kind="image", data=bytes([index]) * 3000) for index in range(4)]
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        segments = [make_segment(index, prompt=2, sampled=2998 if index == 30 else 48) for index in range(61)]
        Producer(writer, "p").append_sync(segments=segments, payloads=images)
    with existing_core(run_dir) as core:
        redact_rollout(core, "e0-p10/0/0", reason="asked")  # its row is written anew, behind the others
    for module in ("portions", "export"):
        monkeypatch.setattr(f"molt.log.{module}.PORTION_BYTES", 4000)
    cut = LogReader.open(run_dir).cut()
    parts = {name: [rows["lsn"].to_pylist() for rows in sorted_batches(cut, name)] for name in ("segments", "payloads")}
    lsns = list(itertools.chain.from_iterable(parts["segments"]))
    assert lsns == sorted(lsns) and len(lsns) == 61 and max(map(len, parts["segments"])) == 10
    assert [part for part in parts["segments"] if lsns[30] in part] == [[lsns[30]]]
    assert [len(part) for part in parts["payloads"]] == [1, 1, 1, 1]
    assert list(map(len, LogReader.open(run_dir).cut().batches(where=f"lsn <> {lsns[10]}"))) == [1] * 60  # by the heaviest
    assert verify_log(run_dir).is_clean
    export_log(run_dir, tmp_path / "export")
    import_log(tmp_path / "export", tmp_path / "again", store="process")
    assert verify_log(tmp_path / "again").root == verify_log(run_dir).root


def test_exported_row_groups_are_bounded_and_read_back_in_pieces(run_dir: Path, tmp_path: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(index) for index in range(300)])
    export_log(run_dir, tmp_path / "export", row_group_bytes=20_000)
    with pq.ParquetFile(tmp_path / "export" / "segments.parquet", page_checksum_verification=True) as file:
        assert file.num_row_groups > 3
        lsn = list(itertools.chain.from_iterable(batch["lsn"].to_pylist() for batch in file.iter_batches(batch_size=7)))
    assert lsn == list(range(300))
