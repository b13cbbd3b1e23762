"""Processes killed, stopped and continued; disks full; files cut; bits flipped: the short versions of tools/faults."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from molt.errors import FencedError
from tools.faults import damage, disk, kill, order
from tools.faults.spawn import Victim, in_child
from tools.faults.wire import WireSink, serve


@pytest.mark.slow
@pytest.mark.parametrize("role", ["writer", "producer", "reader"])
def test_twenty_kills_lose_double_and_reorder_nothing(role: str, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    outcome = kill.kill_writers(run_dir, 20, seed=1) if role == "writer" else kill.kill_clients(run_dir, 20, seed=1, role=role)
    assert outcome.is_clean, outcome
    assert outcome.kills == 20
    assert outcome.compactions_and_clean_ups_ran


def test_stopped_and_continued_writer_is_fenced(tmp_path: Path) -> None:
    run_dir, store = str(tmp_path / "run"), disk.quick_store()
    old = Victim(serve, f"{run_dir}.old", run_dir, store)
    sink = WireSink(f"{run_dir}.old")
    sink.connect()
    assert sink.submit(disk.message(0)).result(30).lsn_end == 2
    os.kill(old.pid, signal.SIGSTOP)
    late = sink.submit(disk.message(1))  # it sleeps with this in its inbox
    assert in_child(_take_over, run_dir) == 5
    os.kill(old.pid, signal.SIGCONT)
    with pytest.raises(FencedError):
        late.result(30)
    old.kill()
    assert in_child(damage.verify_log, run_dir).is_clean


def _take_over(run_dir: str) -> int:
    """A new writer takes the lease from one that does not answer, and writes."""
    from molt.log.writer import LogWriter

    with LogWriter.open(run_dir, run="run", store=disk.quick_store(), steal=True) as writer:
        return writer.submit(disk.message(1)).result(30).lsn_end


def test_second_writer_in_another_process_is_refused_by_pid(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    first = Victim(serve, f"{run_dir}.sock", run_dir, disk.quick_store())
    sink = WireSink(f"{run_dir}.sock")
    sink.connect()
    assert f"process {first.pid} " in in_child(_refusal, run_dir)
    sink.close()
    assert first.wait(30)


def _refusal(run_dir: str) -> str:
    from molt.errors import LeaseHeldError
    from molt.log.writer import LogWriter

    try:
        LogWriter.open(run_dir, run="run", store=disk.quick_store()).close()
    except LeaseHeldError as error:
        return str(error)
    return "it was let in"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_ack_follows_data_directory_manifest_directory(tmp_path: Path) -> None:
    probe = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("tracing is not allowed here")
    seen = order.read_order(order.trace(str(tmp_path / "run"), "durable", str(tmp_path / "trace.txt")))
    assert seen.acks == seen.in_order == order.NUM_MESSAGES


def test_full_disk_is_refused_in_words_and_resumed() -> None:
    try:
        with disk.small_disk() as place:
            figures = in_child(_fill, str(place))
    except (PermissionError, FileNotFoundError):
        pytest.skip("mounting is not allowed here")
    assert figures["refused in words"] == figures["resumed"] > 0
    assert figures["something half-written visible"] == 0
    assert figures["findings at the end"] == 0


def _fill(place: str) -> dict[str, int]:
    return disk.fill_again_and_again(Path(place), step=8192, most=90_000)


def test_read_only_log_is_read_and_not_written() -> None:
    try:
        with disk.small_disk() as place:
            figures = in_child(_read_only, str(place))
    except (PermissionError, FileNotFoundError):
        pytest.skip("mounting is not allowed here")
    assert figures["readers work"]
    assert figures["writer"].startswith("LogFullError")


def _read_only(place: str) -> dict[str, object]:
    return disk.read_only(Path(place))


def test_flipped_bits_are_named_and_reach_no_gradient(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    in_child(damage._make_sealed, run_dir)
    seen, _ = damage.flip_bits(run_dir, 24, seed=2)
    assert seen.reads["silent"] == 0
    assert seen.missed == []
    assert seen.named == seen.tried


@pytest.mark.parametrize("table", ["segments", "payloads"])
def test_cut_files_reach_no_gradient(table: str, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    in_child(damage.last_commit_only, run_dir)
    for seen in (in_child(damage.cut_data, run_dir, table, 501), in_child(damage.cut_manifest, run_dir, table, 301)):
        assert seen.tried > 5
        assert set(seen.reads) == {"refused"}


def test_cut_manifest_heals_without_loss(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    in_child(damage.last_commit_only, run_dir)
    healed = in_child(damage.heal_cuts, run_dir, "segments", 101)
    assert healed["cut"] == healed["healed"] == healed["lost commit found"]
    reopened = in_child(damage.reopen_cuts, run_dir, "segments", 1500)
    assert reopened["reopened"] == reopened["complete"] > 1
