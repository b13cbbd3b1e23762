"""The writer: order, bounds, and what it does when a commit does not go well."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from molt.errors import FencedError, LogError, LogFullError
from molt.log.core import existing_core
from molt.log.inbox import Inbox
from molt.log.message import Ack
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.store import Store, load_store
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_message, make_segment

Fast = Callable[..., Store]


def test_messages_inside_one_window_share_a_commit(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process", window_ms=200.0)) as writer:
        acks = [writer.submit(make_message("p", seq, [seq])) for seq in range(5)]
        assert {ack.result(10).group for ack in acks} == {1}


def test_full_group_does_not_wait_for_its_window(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process", window_ms=60_000.0, max_rows=2)) as writer:
        acks = [writer.submit(make_message("p", seq, [seq])) for seq in range(4)]
        assert [ack.result(10).group for ack in acks] == [1, 1, 2, 2]


def test_causes_come_before_effects_in_the_order(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process", window_ms=100.0)) as writer:
        futures = [writer.submit(make_message("p", seq, [seq], facts=[seq])) for seq in range(2)]
        for future in futures:
            future.result(10)
    cut = LogReader.open(run_dir).cut()
    assert cut.table("segments", ["lsn"])["lsn"].to_pylist() == [0, 1]
    assert cut.table("events", ["lsn"])["lsn"].to_pylist() == [2, 3]


def test_message_whose_predecessor_never_comes_is_given_back(run_dir: Path) -> None:
    store = load_store("process")
    store = store.model_copy(update={"queue": store.queue.model_copy(update={"gap_timeout_s": 0.2})})
    with LogWriter.open(run_dir, run="run", store=store) as writer, pytest.raises(LogError, match="seq 0 did not arrive"):
        writer.submit(make_message("p", 1, [1])).result(10)


def test_submit_waits_while_the_inbox_is_full(run_dir: Path) -> None:
    store = load_store("process")
    tight = {"queue": store.queue.model_copy(update={"max_bytes": 4000, "gap_timeout_s": 0.3})}
    slow = {"commit": store.commit.model_copy(update={"window_ms": 600.0})}
    with LogWriter.open(run_dir, run="run", store=store.model_copy(update=tight | slow)) as writer:
        first = writer.submit(make_message("p", 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]))
        with pytest.raises(LogError, match="no room for"):
            writer.submit(make_message("q", 0, [10, 11, 12, 13, 14, 15, 16])).result(10)
        assert first.result(10).seq == 0
        assert writer.submit(make_message("q", 0, [10])).result(10).seq == 0


def test_failed_group_leaves_the_inbox_as_it_was() -> None:
    from concurrent.futures import Future

    inbox = Inbox({}, max_bytes=1 << 20, read_back=lambda message: b"")
    futures: list[Future[Ack]] = [Future() for _ in range(3)]
    for seq, future in enumerate(futures):
        inbox.accept(make_message("p", seq, [seq]), future)
    assert [entry.message.seq for entry in inbox.take(max_rows=1, max_bytes=1 << 20)] == [0]
    assert [entry.message.seq for entry in inbox.put_back()] == [0]
    assert inbox.next_seq("p") == 0
    assert inbox.ready == []  # seq 1 and 2 wait for 0 again
    inbox.accept(make_message("p", 0, [0]), futures[0])
    assert [entry.message.seq for entry in inbox.ready] == [0, 1, 2]


def test_disk_full_fails_the_group_and_the_writer_goes_on(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        table = writer._core.tables["segments"]
        write, calls = table.write, []

        def full_once(*args: object, **options: object) -> object:
            calls.append(1)
            if len(calls) == 1:
                raise LogFullError("log: No space left on device")
            return write(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(table, "write", full_once)
        with pytest.raises(LogFullError):
            writer.submit(make_message("p", 0, [0])).result(10)
        assert writer.submit(make_message("p", 0, [0])).result(10).is_repetition is False
    assert LogReader.open(run_dir).cut().table("segments").num_rows == 1


def test_group_that_fails_after_its_head_is_completed_before_the_next(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        table = writer._core.tables["events"]
        commit, calls = table.commit, []

        def full_once(*args: object) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise LogFullError("log: No space left on device")
            commit(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(table, "commit", full_once)
        with pytest.raises(LogFullError):
            writer.submit(make_message("p", 0, [0], facts=[0])).result(10)
        half = LogReader.open(run_dir).cut()
        assert half.lsn == -1  # the segment is committed, its event is not: a cut shows neither
        assert half.table("segments").num_rows == 0
        assert writer.submit(make_message("p", 0, [0], facts=[0])).result(10).is_repetition
        assert writer.submit(make_message("p", 1, [1], facts=[1])).result(10).lsn_end == 3
    cut = LogReader.open(run_dir).cut()
    assert cut.table("segments").num_rows == cut.table("events").num_rows == 2


def test_unclear_commit_is_read_back_instead_of_repeated(run_dir: Path, fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    import lance

    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        commit, calls = lance.LanceDataset.commit, []

        def lost_answer(*args: object, **options: object) -> object:
            done = commit(*args, **options)  # type: ignore[arg-type]
            calls.append(1)
            if len(calls) == 1:
                raise OSError("connection reset by peer")
            return done

        monkeypatch.setattr(lance.LanceDataset, "commit", staticmethod(lost_answer))
        assert writer.submit(make_message("p", 0, [0])).result(10).lsn_end == 0
    assert LogReader.open(run_dir).cut().table("segments").num_rows == 1


def test_old_repetition_is_compared_with_the_rows_of_the_log(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        for seq in range(3):
            writer.submit(make_message("p", seq, [seq], facts=[seq])).result(10)
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        assert writer.submit(make_message("p", 0, [0], facts=[0])).result(10).is_repetition
        with pytest.raises(LogError, match="another payload"):
            writer.submit(make_message("p", 0, [9], facts=[0])).result(10)


def test_closed_writer_refuses_and_its_lease_is_free(run_dir: Path, fast: Fast) -> None:
    writer = LogWriter.open(run_dir, run="run", store=fast("process"))
    writer.close()
    writer.close()
    with pytest.raises(LogError, match="closed"):
        writer.submit(make_message("p", 0, [0])).result(10)
    with existing_core(run_dir) as core:
        assert core.state.lsn_end == -1


def test_close_commits_what_was_submitted(run_dir: Path, fast: Fast) -> None:
    writer = LogWriter.open(run_dir, run="run", store=fast("process", window_ms=60_000.0))
    future = writer.submit(make_message("p", 0, [0]))
    writer.close()
    assert future.result(0).lsn_end == 0


def test_run_folder_of_another_run_is_refused(run_dir: Path, fast: Fast) -> None:
    LogWriter.open(run_dir, run="one", store=fast("process")).close()
    with pytest.raises(LogError, match="belongs to run 'one'"):
        LogWriter.open(run_dir, run="two", store=fast("process"))


def test_producer_that_gave_up_takes_no_more_rows(run_dir: Path, fast: Fast) -> None:
    writer = LogWriter.open(run_dir, run="run", store=fast("process"))
    producer = Producer(writer, "p", num_tries=2)
    writer.close()
    with pytest.raises(LogError, match="no ack after 2 tries"):
        producer.append_sync(events=[make_fact(0)])
    with pytest.raises(LogError, match="make a new Producer"):
        producer.append_sync(events=[make_fact(1)])


def test_producer_keeps_a_broken_row_out_and_goes_on(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        with pytest.raises(ValueError, match="is_terminated"):
            producer.append_sync(segments=[make_segment(0, is_terminated=False)])
        assert producer.append_sync(segments=[make_segment(1)]).seq == 0


def test_job_between_commits_sees_whole_groups(run_dir: Path, fast: Fast) -> None:
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        writer.submit(make_message("p", 0, [0], facts=[0])).result(10)
        assert writer.between_commits(lambda core: dict(core.state.rows_end)).result(10)["events"] == 1


def test_fenced_writer_stays_fenced(run_dir: Path, fast: Fast) -> None:
    old = LogWriter.open(run_dir, run="run", store=fast("process"))
    with LogWriter.open(run_dir, run="run", store=fast("process"), steal=True):
        for _ in range(2):
            with pytest.raises(FencedError):
                old.submit(make_message("p", 0, [0])).result(10)
            time.sleep(0.01)
    old.close()


def test_files_encoded_by_producers_keep_order_and_digests(run_dir: Path, fast: Fast) -> None:
    from molt.log.encode import Encoder
    from molt.log.seal import seal_log
    from molt.log.verify import verify_log

    with LogWriter.open(run_dir, run="run", store=fast("durable", window_ms=30.0)) as writer:
        encoded = Producer(writer, "file", encoder=Encoder.open(run_dir))
        plain = Producer(writer, "rows")
        futures = []
        for index in range(0, 12, 4):
            futures.append(
                writer.submit(encoded._message([make_segment(index), make_segment(index + 1)], [], [make_fact(index)], [], [], False))
            )
            futures.append(writer.submit(plain._message([make_segment(index + 2), make_segment(index + 3)], [], [], [], [], False)))
        acks = [future.result(10) for future in futures]
        assert len({ack.group for ack in acks}) < 6  # files and rows share a group
        rows = LogReader.open(run_dir).cut().table("segments", ["prompt_index", "lsn"])
        assert rows["prompt_index"].to_pylist() == list(range(12))
        assert verify_log(run_dir).findings == []
        writer.between_commits(seal_log).result(20)
    assert verify_log(run_dir).findings == []
    assert len(LogReader.open(run_dir).newest("segments").get_fragments()[0].metadata.files) == 1  # merged with its lsn


def test_resent_file_is_a_repetition_after_a_restart(run_dir: Path, fast: Fast) -> None:
    from molt.log.encode import Encoder

    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        message = Producer(writer, "file", encoder=Encoder.open(run_dir))._message([make_segment(0)], [], [], [], [], False)
        writer.submit(message).result(10)
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        assert writer.submit(message).result(10).is_repetition
    assert LogReader.open(run_dir).cut().table("segments").num_rows == 1


def test_rows_that_do_not_fit_fail_alone(run_dir: Path, fast: Fast) -> None:
    from molt.log.encode import WrittenRows
    from molt.log.message import Message

    good, other = make_message("p", 0, [0]), make_message("q", 0, [1])
    short = Message.of("r", 0, 1, {"segments": good.tables["segments"].select(["run", "digest"])})
    lost = Message.of("s", 0, 1, {"segments": WrittenRows(file="gone.lance", num_rows=1, digests=(b"x" * 16,))})
    with LogWriter.open(run_dir, run="run", store=fast("process", window_ms=50.0)) as writer:
        futures = {message.producer: writer.submit(message) for message in (good, short, lost, other)}
        with pytest.raises(ValueError, match="column 'attempt' of segments is None"):
            futures["r"].result(10)
        with pytest.raises(LogError, match=r"gone\.lance cannot be read"):
            futures["s"].result(10)
        again = [writer.submit(message) for message in (good, lost, other)]  # producers send again; each is now tried alone
        assert again[0].result(10).seq == again[2].result(10).seq == 0
        with pytest.raises(LogError, match="cannot be read"):
            again[1].result(10)
    assert LogReader.open(run_dir).cut().table("segments", ["prompt_index"])["prompt_index"].to_pylist() == [0, 1]
