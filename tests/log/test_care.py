"""Looking after a log: upkeep, seals, pins, retention, repair, export, columns added later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import molt.log.descriptor
import molt.schema
from molt.errors import CorruptLogError, DataError, LeaseHeldError, LogError, SettingError
from molt.log.checked import encode
from molt.log.core import existing_core
from molt.log.descriptor import read_descriptor
from molt.log.export import export_log, import_log
from molt.log.fsck import fsck
from molt.log.pin import create_pin, delete_pin, list_pins, verify_pin
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.retention import Family, drop_family, first_needed, redact_rollout
from molt.log.rows import Consumption, Event, Payload, Score, event
from molt.log.seal import read_seal, seal_log
from molt.log.store import RetentionSettings, Store
from molt.log.tombstone import runs_of
from molt.log.upkeep import Upkeep, run_to_merge, sweep
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_image_segment, make_segment, segment_id

Fast = Callable[..., Store]


@pytest.fixture
def filled(run_dir: Path, fast: Fast) -> Path:
    """Four segments, each with a payload of 1,000 bytes, a score and a consumption row: lsn 0..15 in four groups of four."""
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        for index in range(4):
            payload = Payload(kind="routing", data=bytes([index]) * 1000, shape=(1000,), dtype="|u1")
            producer.append_sync(
                segments=[make_segment(index, routing_digest=payload.payload_digest)],
                payloads=[payload],
                scores=[make_score(index)],
                consumption=[make_consumption(index, cursor=4 * index + 1)],
            )
    return run_dir


def make_score(index: int) -> Score:
    return Score(
        step=index,
        policy_version=0,
        segment_id=segment_id(index),
        rank=0,
        trainer_logprobs=np.array([-1, -2, -3], np.float32),
        advantages=np.ones(3, np.float32),
        gate_weights=np.ones(3, np.float32),
    )


def make_consumption(index: int, *, cursor: int) -> Consumption:
    return Consumption(
        step=index,
        segment_id=segment_id(index),
        rollout_id=f"e0-p{index}/0/0",
        group_id=f"e0-p{index}",
        policy_version=0,
        rank=0,
        micro_batch=0,
        position=0,
        n_sampled=3,
        n_kept=3,
        lag=0,
        cursor=cursor,
    )


@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ([1, 1, 1, 1], 4),
        ([100, 1, 1, 1, 1], 4),  # 100 weighs more than twice 4
        ([8, 1, 1, 1, 1], 5),  # 8 weighs twice 4
        ([1], 0),
        ([50, 50], 0),  # both are heavy enough to stay
    ],
)
def test_newest_fragments_are_merged_up_to_a_heavy_neighbour(weights: list[int], count: int) -> None:
    assert run_to_merge(weights, heaviest=50 if weights == [50, 50] else 1000) == count


def test_writer_keeps_fragments_and_versions_few(run_dir: Path, fast: Fast) -> None:
    store = fast("process")
    store = store.model_copy(update={"upkeep": store.upkeep.model_copy(update={"max_fragments": 4, "keep_versions": 4, "grace_s": 0.0})})
    with LogWriter.open(run_dir, run="run", store=store) as writer:
        producer = Producer(writer, "p")
        for index in range(40):
            producer.append_sync(segments=[make_segment(index)])
        dataset = LogReader.open(run_dir).newest("segments")
        assert len(dataset.get_fragments()) <= 8
        assert len(dataset.versions()) <= 12
    assert verify_log(run_dir).findings == []


def test_leftovers_of_groups_that_never_happened_are_swept(filled: Path) -> None:
    stray = filled / "log" / "segments.lance" / "data" / "stray.lance"
    stray.write_bytes(b"half a file")
    with existing_core(filled) as core:
        assert sweep(core, older_than_s=3600) == 0
        assert sweep(core, older_than_s=-1) == 1
    assert verify_log(filled).is_clean


def test_seal_names_every_file_and_one_root(filled: Path) -> None:
    with existing_core(filled) as core:
        seal = seal_log(core)
    assert seal.lsn_end == 15
    assert seal.num_rows == {"payloads": 4, "segments": 4, "scores": 4, "events": 0, "consumption": 4}
    assert read_seal(LogReader.open(filled).home) == seal
    report = verify_log(filled)
    assert report.is_clean
    assert report.root == seal.root


def test_difference_after_the_seal_is_found_even_in_bytes_that_nobody_reads(filled: Path) -> None:
    with existing_core(filled) as core:
        seal_log(core)
    path = next((filled / "log" / "segments.lance" / "_transactions").glob("*.txn"))
    path.write_bytes(path.read_bytes() + b"\0")
    findings = verify_log(filled).findings
    assert [finding.file for finding in findings] == [f"segments.lance/_transactions/{path.name}"]


def test_rows_and_seal_of_another_run_are_found(filled: Path) -> None:
    with existing_core(filled) as core:
        seal_log(core)
    home = LogReader.open(filled).home
    descriptor = read_descriptor(home)
    assert descriptor is not None
    home.write("LOG.json", encode(replace(descriptor, run="other")))
    found = {(item.table, item.file): item.what for item in verify_log(filled).findings}
    assert found["segments", "LOG.json"] == found["payloads", "LOG.json"] == "rows of run run, LOG.json says other"
    assert found["", "SEAL.json"] == "seals run run, LOG.json says other"


def test_rows_appended_after_a_seal_leave_it_true(filled: Path, fast: Fast) -> None:
    with existing_core(filled) as core:
        seal_log(core)
    with LogWriter.open(filled, run="run", store=fast("process")) as writer:
        Producer(writer, "q").append_sync(events=[make_fact(0)])
    assert verify_log(filled).is_clean


def test_pin_that_is_made_again_after_a_seal_leaves_it_true(filled: Path) -> None:
    create_pin(filled, "one")
    with existing_core(filled) as core:
        seal_log(core)
    delete_pin(filled, "one")
    create_pin(filled, "one")
    assert verify_log(filled).findings == []


def test_pin_whose_tag_was_moved_or_lost_is_told(filled: Path) -> None:
    pin = create_pin(filled, "one")
    tags = LogReader.open(filled).newest("segments").tags
    tags.update("molt-one", 1)
    assert [text.split(",")[0] for text in verify_pin(filled, "one")] == ["pin=one: its tag on table segments holds version 1"]
    tags.update("molt-one", pin.versions["segments"])
    assert verify_pin(filled, "one") == []
    tags.delete("molt-one")
    assert "holds version None" in verify_pin(filled, "one")[0]


def test_pin_survives_compaction_and_is_checked_by_digest(filled: Path, fast: Fast) -> None:
    pin = create_pin(filled, "before", at=7)
    assert (pin.lsn, pin.next_row["segments"]) == (7, 2)
    with LogWriter.open(filled, run="run", store=fast("process")) as writer:
        Producer(writer, "q").append_sync(events=[make_fact(0)])
        writer.between_commits(seal_log).result(20)
    assert verify_pin(filled, "before") == []
    assert [item.name for item in list_pins(filled)] == ["before"]
    path = filled / "log" / "pins" / "before.json"
    path.write_text(path.read_text().replace('"lsn": 7', '"lsn": 3'))
    with pytest.raises(CorruptLogError, match="fails its digest"):
        verify_pin(filled, "before")


def test_pin_names_are_refused_when_taken_or_impossible(filled: Path) -> None:
    create_pin(filled, "one")
    with pytest.raises(SettingError, match="exists already"):
        create_pin(filled, "one")
    for name in ("../x", "", "a b"):
        with pytest.raises(SettingError, match="choose another"):
            create_pin(filled, name)
    delete_pin(filled, "one")
    assert list_pins(filled) == []
    with pytest.raises(LogError, match="no such pin"):
        verify_pin(filled, "one")


def test_dropped_scores_leave_every_sum(filled: Path) -> None:
    with existing_core(filled) as core:
        done = drop_family(core, Family.SCORES, before_lsn=8, reason="age")
    assert done.num_rows == 2  # the scores of the first two groups
    cut = LogReader.open(filled).cut()
    assert cut.table("scores", ["n_sampled"])["n_sampled"].to_pylist() == [3, 3, 3, 3]
    assert [len(row) for row in cut.table("scores", ["advantages"])["advantages"].to_pylist()] == [0, 0, 3, 3]
    report = verify_log(filled)
    assert report.is_clean
    assert report.num_emptied == 2


def checkpoint(step: int) -> Event:
    return event("checkpoint_saved", step=step, policy_version=step, path=f"checkpoints/{step}", weights_digest="d", cursor=-1, lsn_end=0)


def test_tokens_that_a_resumed_run_may_train_are_kept(filled: Path) -> None:
    """Group N was trained at step N; its segment has lsn 4 N + 1. A checkpoint after three steps needs none of the first three groups."""
    with existing_core(filled) as core, pytest.raises(SettingError, match=r"before_lsn=2: .* at lsn 1, .*give at most 1"):
        drop_family(core, Family.TOKENS, before_lsn=2, reason="age")
    with LogWriter.open(filled, run="run", attempt=1, store="process") as writer:
        Producer(writer, "q").append_sync(events=[checkpoint(2), checkpoint(3)])
    with existing_core(filled) as core:
        with pytest.raises(SettingError, match="at lsn 9"):
            drop_family(core, Family.TOKENS, before_lsn=13, reason="age", needed_from=first_needed(core, num_checkpoints=2))
        with pytest.raises(SettingError, match="at lsn 13"):
            drop_family(core, Family.TOKENS, before_lsn=14, reason="age")
        assert drop_family(core, Family.ROUTING, before_lsn=20, reason="age").num_rows == 3
        assert drop_family(core, Family.TOKENS, before_lsn=13, reason="age").num_rows == 3
        assert drop_family(core, Family.TOKENS, before_lsn=13, reason="again").num_rows == 0
    with pytest.raises(LogError, match="taken out of the log"):
        LogReader.open(filled).cut().segments([segment_id(0)])
    assert len(LogReader.open(filled).cut().segments([segment_id(3)])) == 1
    assert LogReader.open(filled).cut().table("segments", ["n_tokens"])["n_tokens"].to_pylist() == [5, 5, 5, 5]
    assert verify_log(filled).is_clean


def resumed(step: int) -> Event:
    named = dict.fromkeys(("config", "packages", "hardware"), "{}") | dict.fromkeys(("config_digest", "code_digest", "model_digest"), "d")
    return event("attempt_started", resumed_from_step=step, seed=0, num_steps=9, pid=1, host="h", **named)


def test_checkpoint_that_was_passed_over_is_none_that_a_resumed_run_begins_from(filled: Path) -> None:
    """Group N was trained at step N, at lsn 4 N + 1. Of checkpoints 1 and 3 the later was damaged: the run went on from 1, then saved 2."""
    with LogWriter.open(filled, run="run", attempt=1, store="process") as writer:
        producer = Producer(writer, "q")
        producer.append_sync(events=[checkpoint(1), checkpoint(3)])
    with existing_core(filled) as core:
        assert [first_needed(core, num_checkpoints=number) for number in (1, 2)] == [13, 5]
    with LogWriter.open(filled, run="run", attempt=2, store="process") as writer:
        producer = Producer(writer, "r")
        producer.append_sync(events=[resumed(1)])
    with existing_core(filled) as core:
        assert [first_needed(core, num_checkpoints=number) for number in (1, 2)] == [5, 1]  # with one checkpoint left it may begin again
    with LogWriter.open(filled, run="run", attempt=3, store="process") as writer:
        Producer(writer, "s").append_sync(events=[checkpoint(2)])
    with existing_core(filled) as core:
        assert [first_needed(core, num_checkpoints=number) for number in (1, 2)] == [9, 5]


@pytest.mark.parametrize(("decision", "num_gone"), [("admitted", 1), ("stale", 3)])
def test_ready_group_that_no_step_took_yet_is_kept_though_the_trainer_is_past_it(
    run_dir: Path, fast: Fast, decision: str, num_gone: int
) -> None:
    """Group 1 waits while groups 0 and 2 were trained: the cursor, largest lsn seen, is past it. Dropped as stale it is needed no more."""
    decided = event("group_decided", group_id="e0-p1", decision=decision, reason="r", num_rollouts=1, num_failed=0, n_sampled=3)
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        segments = [make_segment(index) for index in range(3)]
        lsn_end = producer.append_sync(segments=segments).lsn_end
        producer.append_sync(consumption=[make_consumption(index, cursor=lsn_end) for index in (0, 2)])
        producer.append_sync(events=[decided, checkpoint(3)])
    with existing_core(run_dir) as core:
        last = lsn_end + 1
        if decision == "admitted":
            with pytest.raises(SettingError, match="at lsn 1"):
                drop_family(core, Family.TOKENS, before_lsn=last, reason="age")
            last = 1
        assert drop_family(core, Family.TOKENS, before_lsn=last, reason="age").num_rows == num_gone


def test_redacted_rollout_is_gone_from_every_byte(filled: Path) -> None:
    secret = np.arange(200, 205, dtype=np.int32).tobytes()
    assert any(secret in path.read_bytes() for path in (filled / "log").rglob("*.lance") if path.is_file())
    with existing_core(filled) as core:
        done = redact_rollout(core, "e0-p2/0/0", reason="asked by its author")
    assert [(item.table, item.num_rows) for item in done] == [("segments", 1), ("scores", 1), ("payloads", 1)]
    files = [path for path in (filled / "log").rglob("*") if path.is_file()]
    assert not any(secret in path.read_bytes() for path in files)
    assert not any(bytes([2]) * 1000 in path.read_bytes() for path in files)
    assert verify_log(filled).is_clean
    assert LogReader.open(filled).cut().segments([segment_id(3)]).token_ids_T[0] == 300


def test_redaction_takes_the_images_that_no_other_rollout_shows(run_dir: Path, fast: Fast) -> None:
    """Rollouts 0 and 1 show one picture, rollout 1 alone its tensor too; the picture is stored once."""
    picture = Payload(kind="image", data=b"\x89PNG pixels" * 100)
    tensor = Payload.of_array("tensor", np.full((2, 3), 0.5, np.float32))
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        producer.append_sync(segments=[make_image_segment(0, picture.payload_digest)], payloads=[picture])
        named = (picture.payload_digest, tensor.payload_digest)
        producer.append_sync(segments=[make_image_segment(1, *named)], payloads=[picture, tensor])
    assert LogReader.open(run_dir).cut().table("payloads", ["kind"])["kind"].to_pylist() == ["image", "tensor"]
    with existing_core(run_dir) as core:
        done = redact_rollout(core, "e0-p1/0/0", reason="asked by its author")
    assert [(item.table, item.num_rows) for item in done] == [("segments", 1), ("scores", 0), ("payloads", 1)]
    cut = LogReader.open(run_dir).cut()
    assert cut.payload(picture.payload_digest).data == picture.data
    left = cut.table("payloads", ["payload_digest", "data"]).to_pylist()
    assert {row["payload_digest"]: len(row["data"]) for row in left} == {picture.payload_digest: 1100, tensor.payload_digest: 0}
    assert verify_log(run_dir).is_clean


def test_emptied_rows_keep_seal_and_tail_true(filled: Path) -> None:
    with existing_core(filled) as core:
        root = seal_log(core).root
        redact_rollout(core, "e0-p1/0/0", reason="asked")
    tail = LogReader.open(filled).tail("segments", ["prompt_index"])
    assert tail.poll()["prompt_index"].to_pylist() == [0, 1, 2, 3]
    report = verify_log(filled)
    assert report.findings == []
    assert read_seal(LogReader.open(filled).home).root == root  # type: ignore[union-attr]


def test_repair_saves_what_is_true_and_names_the_rest(filled: Path, fast: Fast) -> None:
    path = sorted((filled / "log" / "segments.lance" / "data").glob("*.lance"), key=lambda file: file.stat().st_mtime)[1]
    path.write_bytes(path.read_bytes()[:50])
    assert not fsck(filled).is_clean
    done = fsck(filled, is_repairing=True)
    assert done.is_clean
    assert [(finding.lsn_first, finding.lsn_last) for finding in done.lost] == [(5, 5)]
    assert len(done.quarantined) == 1
    assert fsck(filled).is_clean
    tail = LogReader.open(filled).tail("segments", ["prompt_index"])
    assert tail.poll()["prompt_index"].to_pylist() == [0, 2, 3]
    with LogWriter.open(filled, run="run", store=fast("process")) as writer:
        assert Producer(writer, "q").append_sync(events=[make_fact(0)]).lsn_end == 17  # 16 is the event that names the loss


def test_repair_waits_for_the_lease(filled: Path, fast: Fast) -> None:
    with LogWriter.open(filled, run="run", store=fast("process")), pytest.raises(LeaseHeldError):
        fsck(filled, is_repairing=True)


def test_export_and_import_keep_rows_order_and_root(filled: Path, tmp_path: Path) -> None:
    made = export_log(filled, tmp_path / "export", row_group_bytes=2000)
    assert {name: item["rows"] for name, item in made.tables.items()} == {
        "payloads": 4,
        "segments": 4,
        "scores": 4,
        "events": 0,
        "consumption": 4,
    }
    assert "token_ids" in (tmp_path / "export" / "README.md").read_text()
    import_log(tmp_path / "export", tmp_path / "copy", store="process")
    assert verify_log(tmp_path / "copy").root == verify_log(filled).root
    with pytest.raises(SettingError, match="not empty"):
        export_log(filled, tmp_path / "export")


def test_damaged_export_is_refused(filled: Path, tmp_path: Path) -> None:
    export_log(filled, tmp_path / "export")
    path = tmp_path / "export" / "segments.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptLogError, match="not the exported file"):
        import_log(tmp_path / "export", tmp_path / "copy")


@pytest.fixture
def grown_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The declared schema with one more column in events, as a later release would have it."""
    folder = tmp_path / "schemas"
    folder.mkdir()
    for path in molt.schema.folder("schemas").glob("*.sql"):
        text = path.read_text()
        if path.stem == "events":
            text = text.replace("body varchar not null,", "body varchar not null,\n    weight double,")
        (folder / path.name).write_text(text)
    (folder / "events").symlink_to(molt.schema.folder("schemas") / "events")
    monkeypatch.setattr(molt.schema, "folder", lambda name: folder)
    molt.schema.tables.cache_clear()
    yield
    monkeypatch.undo()
    molt.schema.tables.cache_clear()


def test_old_log_is_read_with_the_new_column_as_null(run_dir: Path, fast: Fast, request: pytest.FixtureRequest) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(events=[make_fact(0)])
    request.getfixturevalue("grown_schema")
    cut = LogReader.open(run_dir).cut()
    assert cut.table("events", ["step", "weight"]).to_pylist() == [{"step": 0, "weight": None}]
    assert cut.connect().sql("select weight from events").fetchall() == [(None,)]
    assert verify_log(run_dir).is_clean


def test_column_is_added_when_a_new_writer_goes_on(run_dir: Path, fast: Fast, request: pytest.FixtureRequest) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(events=[make_fact(0)])
    request.getfixturevalue("grown_schema")
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        rows = pa.RecordBatch.from_pylist(
            [
                {
                    "run": "run",
                    "attempt": 1,
                    "producer": "q",
                    "seq": 0,
                    "kind": "k",
                    "happened_at": 0.0,
                    "body": "{}",
                    "weight": 2.5,
                    "digest": b"",
                }
            ],
            schema=pa.schema([field for field in molt.schema.arrow_schema("events") if field.name != "lsn"]),
        )
        from molt.log.digest import row_digests
        from molt.log.message import Message

        place = rows.schema.get_field_index("digest")
        rows = rows.set_column(place, rows.schema.field("digest"), pa.array(row_digests(rows), pa.binary()))
        writer.submit(Message.of("q", 0, 1, {"events": rows})).result(10)
    assert LogReader.open(run_dir).cut().table("events", ["weight"])["weight"].to_pylist() == [None, 2.5]
    assert verify_log(run_dir).is_clean


def test_log_with_a_newer_column_is_refused_by_name(run_dir: Path, fast: Fast, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("grown_schema")
    LogWriter.open(run_dir, run="run", store=fast("process")).close()
    original = molt.schema.Path(molt.schema.__file__).resolve().parents[1] / "schemas"
    molt.schema.folder = lambda name: original  # type: ignore[assignment]
    molt.schema.tables.cache_clear()
    for use in (lambda: LogReader.open(run_dir).cut(), lambda: LogWriter.open(run_dir, run="run", store=fast("process"))):
        with pytest.raises(LogError, match=r"column 'weight' was written by molt \d"):
            use()


def test_export_of_an_older_release_is_imported_and_that_of_a_newer_one_refused_by_name(
    run_dir: Path, tmp_path: Path, fast: Fast, request: pytest.FixtureRequest
) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        Producer(writer, "p").append_sync(events=[make_fact(0)], segments=[make_segment(0)])
    root = export_log(run_dir, tmp_path / "older").root
    request.getfixturevalue("grown_schema")
    import_log(tmp_path / "older", tmp_path / "copy", store="process")
    assert LogReader.open(tmp_path / "copy").cut().table("events", ["step", "weight"]).to_pylist() == [{"step": 0, "weight": None}]
    report = verify_log(tmp_path / "copy")
    assert report.is_clean and report.root == root
    export_log(tmp_path / "copy", tmp_path / "newer")
    original = molt.schema.Path(molt.schema.__file__).resolve().parents[1] / "schemas"
    molt.schema.folder = lambda name: original  # type: ignore[assignment]
    molt.schema.tables.cache_clear()
    with pytest.raises(DataError, match=r"events\.parquet: column 'weight' was written by molt \d.*take that version or a newer one"):
        import_log(tmp_path / "newer", tmp_path / "again", store="process")
    assert not (tmp_path / "again" / "log").exists()


def test_log_of_a_newer_format_is_refused_with_the_version(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(molt.log.descriptor, "FORMAT", 0)
    with pytest.raises(LogError, match=r"format 1, written by molt \d.*reads up to 0"):
        LogReader.open(filled)


def test_older_format_is_upcast_row_by_row(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import molt.log.upcast

    def upcast_1(table: str, rows: pa.Table) -> pa.Table:
        if "step" not in rows.schema.names:
            return rows
        place = rows.schema.get_field_index("step")
        return rows.set_column(place, "step", pa.compute.add(rows["step"], 100))

    monkeypatch.setattr(molt.log.descriptor, "FORMAT", 2)
    cut = LogReader.open(filled).cut()
    with pytest.raises(LogError, match="no function that reads it"):
        cut.table("scores", ["step"])
    monkeypatch.setitem(molt.log.upcast.UPCASTS, 1, upcast_1)
    assert cut.table("scores", ["step"])["step"].to_pylist() == [100, 101, 102, 103]


def test_runs_of_numbers_are_merged() -> None:
    assert runs_of([5, 1, 2, 3, 7, 8]) == [[1, 3], [5, 5], [7, 8]]


def test_compaction_of_everything_twice_changes_nothing(filled: Path) -> None:
    root = verify_log(filled).root
    with existing_core(filled) as core:
        upkeep = Upkeep(core)
        assert upkeep.compact(core.tables["segments"], is_full=True) == 3
        assert upkeep.compact(core.tables["segments"], is_full=True) == 0
    assert verify_log(filled).root == root


def test_image_that_untrained_rows_show_is_kept_and_an_emptied_one_comes_in_again(run_dir: Path, fast: Fast) -> None:
    """Rollout 0 was trained and showed the first picture, rollout 1 was not and shows the second; rollout 2 shows the first once more."""
    first, second = (Payload(kind="image", data=bytes([number]) * 300) for number in (1, 2))
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        ack = producer.append_sync(segments=[make_image_segment(0, first.payload_digest)], payloads=[first])
        producer.append_sync(consumption=[make_consumption(0, cursor=ack.lsn_end)], events=[checkpoint(1)])
        producer.append_sync(segments=[make_image_segment(1, second.payload_digest)], payloads=[second])
    with existing_core(run_dir) as core:
        assert drop_family(core, Family.PAYLOADS, before_lsn=100, reason="age").num_rows == 1
    cut = LogReader.open(run_dir).cut()
    assert cut.payload(second.payload_digest).data == second.data
    with pytest.raises(LogError, match="taken out of the log"):
        cut.payload(first.payload_digest)
    with LogWriter.open(run_dir, run="run", attempt=2, store=fast("process")) as writer:
        again = [make_image_segment(2, first.payload_digest)]
        Producer(writer, "p").append_sync(segments=again, payloads=[first, second])
    cut = LogReader.open(run_dir).cut()
    assert cut.payload(first.payload_digest).data == first.data
    assert cut.payload_range(first.payload_digest, 298, 2) == bytes([1, 1])
    assert cut.table("payloads", ["payload_digest"]).num_rows == 3  # the first twice, once of it empty
    assert verify_log(run_dir).is_clean


def test_profile_takes_images_when_an_attempt_begins(run_dir: Path, fast: Fast) -> None:
    kept = RetentionSettings(payload_rows=4)
    store = fast("process").model_copy(update={"retention": kept})

    def num_held() -> int:
        return sum(1 for data in LogReader.open(run_dir).cut().table("payloads", ["data"])["data"].to_pylist() if data)

    with LogWriter.open(run_dir, run="run", store=store) as writer:
        producer = Producer(writer, "p")
        for index in range(66):
            producer.append_sync(payloads=[Payload(kind="image", data=bytes([index]) * 50)])
    assert num_held() == 66  # workers that know them as sent may name them again
    for attempt, left in ((1, 66), (2, 4)):  # the same attempt goes on, then the next begins
        with LogWriter.open(run_dir, run="run", attempt=attempt, store=store):
            pass
        assert num_held() == left


def test_profile_keeps_only_the_newest_heavy_rows(run_dir: Path, fast: Fast) -> None:
    store = fast("process")
    kept = RetentionSettings(payload_rows=4, score_rows=4, token_rows=4)
    with LogWriter.open(run_dir, run="run", store=store.model_copy(update={"retention": kept})) as writer:
        producer = Producer(writer, "p")
        for index in range(70):  # retention looks after every 64th group
            payload = Payload(kind="routing", data=bytes([index]) * 50)
            producer.append_sync(
                segments=[make_segment(index)],
                payloads=[payload],
                scores=[make_score(index)],
                consumption=[make_consumption(index, cursor=4 * index)],
                events=[checkpoint(index + 1)],
            )
    cut = LogReader.open(run_dir).cut()
    held = [len(tokens) > 0 for tokens in cut.table("segments", ["token_ids"])["token_ids"].to_pylist()]
    assert held == [False] * 60 + [True] * 10  # 64 rows were there, 4 are kept, 6 came after
    assert sum(1 for data in cut.table("payloads", ["data"])["data"].to_pylist() if data) == 10
    assert verify_log(run_dir).findings == []
