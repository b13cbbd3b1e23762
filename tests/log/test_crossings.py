"""Where two parts of the log meet: repair and crash, redaction and pins, emptied rows and empty ones, tables that are missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import orjson
import pyarrow as pa
import pytest

import molt.schema
from molt.cli.log_verbs import drop
from molt.errors import CorruptLogError, DataError, FencedError, LogError, LogFullError, SettingError
from molt.log.core import existing_core
from molt.log.export import export_log, import_log
from molt.log.fsck import fsck
from molt.log.holds import hold
from molt.log.home import LocalHome, find_home
from molt.log.lease import ExpiringLease
from molt.log.pin import create_pin, delete_pin, verify_pin
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.retention import Family, drop_family, redact_rollout
from molt.log.rows import Payload, Score, event
from molt.log.store import Store
from molt.log.table import LogTable
from molt.log.upkeep import Alarm
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_message, make_segment, segment_id

Fast = Callable[..., Store]


@pytest.fixture
def three(run_dir: Path, fast: Fast) -> Path:
    """Three segments and three facts: lsn 0 1, 2 3, 4 5."""
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        for index in range(3):
            producer.append_sync(segments=[make_segment(index)], events=[make_fact(index)])
    return run_dir


def make_score(index: int, n_sampled: int) -> Score:
    ones = np.ones(n_sampled, np.float32)
    return Score(
        step=0,
        policy_version=0,
        segment_id=segment_id(index),
        rank=0,
        trainer_logprobs=-ones,
        advantages=ones,
        gate_weights=ones,
    )


def bytes_of(run_dir: Path, table: str) -> bytes:
    return b"".join(path.read_bytes() for path in (run_dir / "log" / f"{table}.lance").rglob("*") if path.is_file())


def test_writer_refuses_a_log_from_which_a_table_is_missing(three: Path, fast: Fast) -> None:
    shutil.rmtree(three / "log" / "events.lance")
    # the intent of the last group still names its fact, so two are missed
    with pytest.raises(CorruptLogError, match=r"2 of 6 rows are in no table.*molt fsck"):
        LogWriter.open(three, run="run", store=fast("process"))
    done = fsck(three, is_repairing=True)
    assert [(item.lsn_first, item.lsn_last) for item in done.lost] == [(1, 1), (3, 3), (5, 5)]
    LogWriter.open(three, run="run", store=fast("process")).close()


def test_log_that_lost_rows_and_was_repaired_is_opened_again(three: Path, fast: Fast) -> None:
    path = sorted((three / "log" / "segments.lance" / "data").glob("*.lance"), key=lambda file: file.stat().st_mtime)[0]
    path.write_bytes(path.read_bytes()[:50])
    assert fsck(three, is_repairing=True).is_clean
    with LogWriter.open(three, run="run", store=fast("process"), attempt=2) as writer:
        Producer(writer, "q").append_sync(events=[make_fact(3)])
    assert verify_log(three).is_clean


def test_repair_that_dies_on_its_way_loses_no_row_that_can_be_read(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(0), make_segment(1)])
    with existing_core(run_dir) as core:  # the second row holds other tokens than its digest says
        table = core.tables["segments"]
        rows = table.dataset.to_table()
        place = rows.schema.get_field_index("reward")
        wrong = rows.set_column(place, rows.schema.field("reward"), pa.chunked_array([pa.array([1.0, 9.0], pa.float32())]))
        transaction, _ = table.dataset.merge_insert("lsn").when_matched_update_all().execute_uncommitted(wrong)
        table.commit_operation(transaction.operation, core.state.stamp("segments", "carry"))
    commit_operation = LogTable.commit_operation
    for number in range(1, 9):  # five tables get a new epoch, then the repair
        left = [number]

        def dies(self: LogTable, *args: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            commit_operation(self, *args)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(LogTable, "commit_operation", dies)
            fsck(run_dir, is_repairing=True)
    done = fsck(run_dir, is_repairing=True)
    assert LogReader.open(run_dir).cut().table("segments", ["segment_id"])["segment_id"].to_pylist() == [segment_id(0)]
    assert done.is_clean


def test_rows_that_stand_twice_in_one_table_are_told(three: Path) -> None:
    with existing_core(three) as core:
        table = core.tables["segments"]
        rows = table.dataset.to_table(filter="lsn = 2")
        table.commit(table.write(rows, max_bytes=1 << 20), core.state.stamp("segments", "carry"))
    assert [(item.table, item.lsn_first, item.what) for item in verify_log(three).findings] == [("segments", 2, "an lsn is used twice")]


def test_rows_with_nothing_to_empty_do_not_make_the_emptied_look_broken(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(scores=[make_score(0, 3), make_score(1, 0)])
    with existing_core(run_dir) as core:
        assert drop_family(core, Family.SCORES, before_lsn=2, reason="test").num_rows >= 1
    report = verify_log(run_dir)
    assert (report.findings, report.num_emptied) == ([], 1)


def test_emptied_rows_of_which_one_was_lost_later_are_clean_once_that_is_declared(three: Path) -> None:
    with LogWriter.open(three, run="run", store="process") as writer:
        Producer(writer, "q").append_sync(scores=[make_score(0, 3), make_score(1, 3)])
    with existing_core(three) as core:
        drop_family(core, Family.SCORES, before_lsn=100, reason="test")
    lance.dataset(str(three / "log" / "scores.lance")).delete("lsn = 6")
    assert [(item.lsn_first, item.lsn_last) for item in fsck(three, is_repairing=True).lost] == [(6, 6)]
    report = verify_log(three)
    assert (report.findings, report.num_emptied, report.num_lost) == ([], 1, 1)


@pytest.fixture
def pair(run_dir: Path, fast: Fast) -> Path:
    """Two segments in one fragment: lsn 0 and 1."""
    with LogWriter.open(run_dir, run="run", store=fast("durable")) as writer:
        Producer(writer, "p").append_sync(segments=[make_segment(0), make_segment(1)])
    return run_dir


def test_redaction_that_died_before_its_clean_up_is_completed_by_the_next(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = make_segment(1).token_ids.tobytes()  # 100 101 ... as they lie in the file
    assert tokens in bytes_of(pair, "segments")
    with existing_core(pair) as core, monkeypatch.context() as patch:
        patch.setattr("molt.log.retention.Upkeep", lambda core: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            redact_rollout(core, "e0-p1/0/0", reason="asked")
    assert tokens in bytes_of(pair, "segments")
    with existing_core(pair) as core:
        redact_rollout(core, "e0-p1/0/0", reason="asked")
    assert tokens not in bytes_of(pair, "segments")


def test_redaction_names_whoever_still_holds_the_content_and_takes_it_when_they_are_gone(three: Path) -> None:
    tokens = make_segment(1).token_ids.tobytes()
    create_pin(three, "before")
    with existing_core(three) as core:
        assert redact_rollout(core, "e0-p1/0/0", reason="asked")[0].kept_by == ("pins/before.json",)
    create_pin(three, "after")
    with existing_core(three) as core:
        assert redact_rollout(core, "e0-p1/0/0", reason="asked")[0].kept_by == ("pins/before.json",)
    delete_pin(three, "before")
    reader = LogReader.open(three)
    with existing_core(three) as core:
        redact_rollout(core, "e0-p1/0/0", reason="asked")
        assert tokens not in bytes_of(three, "segments")
        hold(reader.home, {"segments": core.tables["segments"].dataset.version}, reader)
        (name,) = reader.home.names("readers/")
        assert redact_rollout(core, "e0-p2/0/0", reason="asked")[0].kept_by == ("pins/after.json", name)


def test_redaction_syncs_every_file_that_its_version_names(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    for name, sync in (("fsync", os.fsync), ("fdatasync", os.fdatasync)):

        def noted(handle: int, sync: Callable[[int], None] = sync) -> None:
            synced.add(os.readlink(f"/proc/self/fd/{handle}"))
            sync(handle)

        monkeypatch.setattr(os, name, noted)
    monkeypatch.setattr("molt.log.retention.Upkeep.compact", lambda self, table, is_full: 0)  # it would take the deletion file away
    with existing_core(pair) as core:
        redact_rollout(core, "e0-p1/0/0", reason="asked")
    root = (pair / "log" / "segments.lance").resolve()
    (deletions,) = (root / "_deletions").iterdir()
    (manifest, *_) = sorted((root / "_versions").glob("*.manifest"))
    assert {str(deletions), str(deletions.parent), str(manifest), str(manifest.parent)} <= synced


@pytest.fixture
def grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Declares one more column of a table before one that it has, as a later release would."""

    def declare(table: str, column: str, before: str) -> None:
        folder = tmp_path / "schemas"
        shutil.copytree(molt.schema.folder("schemas"), folder)
        path = folder / f"{table}.sql"
        path.write_text(path.read_text().replace(f"    {before} ", f"    {column},\n    {before} ", 1))
        monkeypatch.setattr(molt.schema, "folder", lambda name: folder)
        molt.schema.tables.cache_clear()

    yield declare
    monkeypatch.undo()
    molt.schema.tables.cache_clear()


def test_redaction_and_repair_keep_columns_apart_in_a_log_that_got_one_later(three: Path, grow: Callable[[str, str, str], None]) -> None:
    before = LogReader.open(three).cut().table("segments", ["segment_id", "reward", "outcome", "n_tokens", "is_terminated"]).to_pylist()
    grow("segments", "bonus float", "reward")
    with existing_core(three) as core:
        redact_rollout(core, "e0-p1/0/0", reason="asked")
    assert verify_log(three).is_clean
    with existing_core(three) as core:  # the last row gets a number that its digest does not know
        table = core.tables["segments"]
        rows = table.dataset.to_table().sort_by("lsn")
        place = rows.schema.get_field_index("n_tokens")
        wrong = rows.set_column(place, rows.schema.field("n_tokens"), pa.chunked_array([pa.array([5, 5, 6], pa.int32())]))
        transaction, _ = table.dataset.merge_insert("lsn").when_matched_update_all().execute_uncommitted(wrong)
        table.commit_operation(transaction.operation, core.state.stamp("segments", "carry"))
    assert fsck(three, is_repairing=True).is_clean
    after = LogReader.open(three).cut().table("segments", ["segment_id", "reward", "outcome", "n_tokens", "is_terminated"]).to_pylist()
    assert len(after) == 2
    assert all(row in before for row in after)


def test_fact_of_the_writer_itself_outlives_a_full_disk(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        alarms = [Alarm(table="events", what="live fragments", value=1000.0, limit=1000.0)]
        monkeypatch.setattr(writer._upkeep, "run", lambda: [alarms.pop()] if alarms else [])
        table = writer._core.tables["events"]
        write, left = table.write, [1]

        def full_once(*args: Any, **options: Any) -> Any:
            if left:
                left.pop()
                raise LogFullError("log: No space left on device")
            return write(*args, **options)

        monkeypatch.setattr(table, "write", full_once)
        producer.append_sync(segments=[make_segment(0)])
        producer.append_sync(segments=[make_segment(1)])
    kinds = LogReader.open(run_dir).cut().table("events", ["kind"])["kind"].to_pylist()
    assert (left, kinds) == ([], ["log_alarmed"])


def test_job_is_refused_when_what_a_group_owes_cannot_be_committed(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        table = writer._core.tables["events"]

        def full(*args: Any) -> None:
            raise LogFullError("log: No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(table, "commit", full)
            with pytest.raises(LogFullError):
                writer.submit(make_message("p", 0, [0], facts=[0])).result(10)
            with pytest.raises(LogFullError):
                writer.between_commits(lambda core: None).result(10)
        assert writer.between_commits(lambda core: core.state.rows_end["events"]).result(10) == 1


def test_writer_that_cannot_begin_gives_its_lease_back(three: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("molt.log.writer.Inbox", lambda *args, **options: (_ for _ in ()).throw(LogError("no")))
        with pytest.raises(LogError, match="no"):
            LogWriter.open(three, run="run", store=fast("process"))
    LogWriter.open(three, run="run", store=fast("process")).close()


def test_expiring_lease_outlives_a_renewal_that_fails(tmp_path: Path) -> None:
    tries: list[str] = []

    class Away(LocalHome):
        def write(self, name: str, content: bytes) -> None:
            tries.append(name)
            if len(tries) == 1:
                raise LogFullError("log: No space left on device")
            super().write(name, content)

    lease = ExpiringLease(Away(tmp_path, is_synced=False, session_bytes=1 << 20), ttl_s=3.0, steal=False)
    first, until = lease._me.expires_at, time.monotonic() + 10
    while lease._me.expires_at == first and time.monotonic() < until:
        time.sleep(0.05)
    assert lease._me.expires_at > first and len(tries) >= 2
    lease.check()
    lease.release()


def test_export_of_an_old_pin_of_rows_that_were_emptied_since_says_so(three: Path, tmp_path: Path) -> None:
    with existing_core(three) as core:
        redact_rollout(core, "e0-p1/0/0", reason="asked")
    create_pin(three, "old", at=5)  # its rows are emptied, the tombstone is at lsn 6
    assert verify_pin(three, "old") == []
    with pytest.raises(SettingError, match=r"pin=old.*lsn 6"):
        export_log(three, tmp_path / "old", pin="old")
    create_pin(three, "new")
    export_log(three, tmp_path / "new", pin="new")
    import_log(tmp_path / "new", tmp_path / "copy", store="process")
    assert verify_log(tmp_path / "copy").is_clean


def test_imported_log_goes_on_after_its_newest_attempt(three: Path, fast: Fast, tmp_path: Path) -> None:
    with LogWriter.open(three, run="run", store=fast("process"), attempt=3) as writer:
        Producer(writer, "q").append_sync(events=[make_fact(3)])
    export_log(three, tmp_path / "export")
    import_log(tmp_path / "export", tmp_path / "copy", store="process")
    with pytest.raises(FencedError, match="attempt=2 is over, 3 has begun"):
        LogWriter.open(tmp_path / "copy", run="run", store=fast("process"), attempt=2)


def test_import_that_fails_leaves_no_log_behind(three: Path, tmp_path: Path) -> None:
    export_log(three, tmp_path / "export")
    manifest = tmp_path / "export" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"root": "', '"root": "0'))
    for _ in range(2):
        with pytest.raises(CorruptLogError, match="nothing was imported"):
            import_log(tmp_path / "export", tmp_path / "copy", store="process")
    assert find_home(tmp_path / "copy") is None


def test_pin_of_an_older_format_is_upcast_like_the_newest_state(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_pin(three, "old")
    monkeypatch.setattr("molt.log.descriptor.FORMAT", 2)
    for cut in (LogReader.open(three).cut(), LogReader.open(three).cut("old")):
        with pytest.raises(LogError, match="no function that reads it"):
            cut.table("events", ["step"])


def test_writer_of_a_newer_format_does_not_mix_its_rows_into_an_older_log(three: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molt.log.descriptor.FORMAT", 2)
    with pytest.raises(LogError, match=r"format 1.*writes format 2"):
        LogWriter.open(three, run="run", store=fast("process"))


def test_profile_of_the_newest_attempt_is_the_one_that_verbs_go_by(three: Path, fast: Fast) -> None:
    LogWriter.open(three, run="run", store=fast("durable"), attempt=2).close()
    with existing_core(three) as core:
        assert (core.store.name, core.store.is_synced) == ("durable", True)


def test_text_that_is_no_unicode_still_makes_a_fact() -> None:
    fact = event("step_refused", step=0, reason="nothing_kept", error="bad \udc80 name", n_sampled=0)
    assert fact.body["error"] == "bad \\udc80 name"
    with pytest.raises(DataError, match="n_sampled"):
        event("step_refused", step=0, reason="nothing_kept", error="", n_sampled=1 << 70)


def test_rows_that_were_emptied_are_not_called_damaged(three: Path) -> None:
    with existing_core(three) as core:
        redact_rollout(core, "e0-p1/0/0", reason="asked")
    with pytest.raises(LogError, match=r"segment_id=e0-p1/0/0/0: its tokens were taken out"):
        list(LogReader.open(three).cut().batches())
    assert sum(len(batch) for batch in LogReader.open(three).cut().batches(where="rollout_id <> 'e0-p1/0/0'")) == 2


def test_checkpoint_that_builds_on_rows_that_are_not_there_is_told(three: Path, fast: Fast) -> None:
    LogReader.open(three).must_reach(5, "checkpoint step-00000001")
    shutil.rmtree(three / "log")
    LogWriter.open(three, run="run", store=fast("process"), attempt=2).close()
    with pytest.raises(LogError, match=r"ends at lsn -1, but checkpoint step-00000001 builds on lsn 5"):
        LogReader.open(three).must_reach(5, "checkpoint step-00000001")


def test_waiting_group_of_a_redacted_rollout_is_decided_so_that_a_resumed_run_can_go_on(three: Path) -> None:
    with LogWriter.open(three, run="run", store="process") as writer:
        producer = Producer(writer, "leader")
        sent = {"epoch": 0, "prompt_id": "p", "group_size": 1, "members": [0], "purpose": "train"}
        for index in range(3):
            place = {"group_id": f"e0-p{index}", "prompt_index": index, "order_index": index}
            producer.append_sync(events=[event("group_dispatched", **sent, **place)])
        figures = {"num_segments": 1, "num_rollouts": 1, "n_sampled": 3, "seed": 0, "cursor": 0}
        planned = event("batch_planned", step=0, policy_version=0, plan="{}", plan_digest="", groups=["e0-p0"], **figures)
        producer.append_sync(events=[planned])
    with existing_core(three) as core:
        for index in (0, 1, 1):  # group 0 is in a plan, group 1 waits; the second time it is decided already
            redact_rollout(core, f"e0-p{index}/0/0", reason="asked")
    decided = LogReader.open(three).cut().table("events", ["body"], where="kind = 'group_decided'")["body"].to_pylist()
    (verdict,) = map(orjson.loads, decided)
    assert (verdict["group_id"], verdict["decision"]) == ("e0-p1", "incomplete")
    assert verdict["reason"] == "a rollout of it was redacted: asked"
    assert (verdict["num_rollouts"], verdict["n_sampled"]) == (1, 3)
    assert verify_log(three).is_clean


def test_much_content_is_emptied_part_by_part(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molt.log.retention._PART_BYTES", 2500)
    payloads = [Payload(kind="routing", data=bytes([index]) * 1000, shape=(1000,), dtype="|u1") for index in range(5)]
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(payloads=payloads)
    with existing_core(run_dir) as core:
        done = drop_family(core, Family.ROUTING, before_lsn=4, reason="test")
    assert (done.num_rows, done.size_bytes) == (4, 4000)
    cut = LogReader.open(run_dir).cut()
    assert cut.table("events", ["kind"]).num_rows == 2  # two payloads go into 2,500 bytes, so two tombstones
    assert cut.payload(payloads[4].payload_digest) == payloads[4]
    assert b"\x03" * 1000 not in bytes_of(run_dir, "payloads")
    report = verify_log(run_dir)
    assert (report.findings, report.num_emptied) == ([], 4)


def test_dropping_says_which_pin_still_holds_the_content(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LogWriter.open(three, run="run", store="process") as writer:
        Producer(writer, "q").append_sync(scores=[make_score(0, 3)])
    create_pin(three, "before")
    drop(str(three), "scores", before_lsn=100)
    assert capsys.readouterr().out == "1 rows of scores emptied, 0 bytes of blobs; still held by pins/before.json\n"
