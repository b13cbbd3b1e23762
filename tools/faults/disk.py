"""A disk that is full at every write site, and one that cannot be written to. Needs the right to mount a tmpfs.

    leave k bytes free, append, see it refused in words, free the space, send the same message again, read everything; for k = 0, step, ...

Run: python -m tools.faults.disk
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt.errors import LogFullError, MoltError
from molt.log.message import Message
from molt.log.reader import LogReader
from molt.log.rows import to_arrow
from molt.log.store import Store, load_store
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tools.faults.evidence import keep
from tools.faults.rows import blob, fact, segment


@contextlib.contextmanager
def small_disk(size: str = "3m") -> Iterator[Path]:
    """A tmpfs of that size; PermissionError where mounting is not allowed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False)
        if done.returncode:
            raise PermissionError(done.stderr.decode())
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def message(seq: int) -> Message:
    """A message over three tables."""
    tables = {
        "segments": to_arrow("segments", [segment(0, seq)], run="run", attempt=1, producer="p", seq=seq),
        "events": to_arrow("events", [fact(0, seq)], run="run", attempt=1, producer="p", seq=seq),
        "payloads": to_arrow("payloads", [blob(0, 2 * seq)], run="run", attempt=1, producer="p", seq=seq),
    }
    return Message.of("p", seq, 1, tables)


def quick_store() -> Store:
    """The durable profile with a short window and early clean-up."""
    store = load_store("durable")
    upkeep = store.upkeep.model_copy(update={"max_fragments": 8, "keep_versions": 4})
    return store.model_copy(update={"commit": store.commit.model_copy(update={"window_ms": 1.0}), "upkeep": upkeep})


def leave_free(disk: Path, num_bytes: int) -> Path:
    """Fill the disk but for that many bytes."""
    ballast = disk / "ballast"
    free = shutil.disk_usage(disk).free
    with ballast.open("wb") as stream, contextlib.suppress(OSError):
        stream.write(b"\0" * max(0, free - num_bytes))
    return ballast


def fill_again_and_again(disk: Path, *, step: int, most: int) -> dict[str, Any]:
    """For each amount of free space: append, see what happens, free the space, resend, compare."""
    figures: Counter[str] = Counter()
    seq = 0
    run_dir = disk / "run"
    for free in range(0, most, step):
        with LogWriter.open(run_dir, run="run", store=quick_store()) as writer:
            ballast = leave_free(disk, free)
            before = LogReader.open(run_dir).cut().lsn
            try:
                writer.submit(message(seq)).result(30)
                figures["fitted"] += 1
            except LogFullError as error:
                figures["refused in words"] += "resume" in str(error)
                cut = LogReader.open(run_dir).cut()
                figures["something half-written visible"] += cut.lsn != before or cut.table("segments").num_rows != seq
                ballast.unlink(missing_ok=True)
                writer.submit(message(seq)).result(30)
                figures["resumed"] += 1
            ballast.unlink(missing_ok=True)
            seq += 1
        if seq % 20 == 0:
            shutil.rmtree(run_dir)
            seq = 0
    figures["findings at the end"] = len(verify_log(run_dir).findings) if run_dir.exists() else 0
    return dict(figures)


def read_only(disk: Path) -> dict[str, Any]:
    """A log on a disk that became read-only: readers work, a writer is refused in words."""
    run_dir = disk / "run"
    with LogWriter.open(run_dir, run="run", store=quick_store()) as writer:
        writer.submit(message(0)).result(30)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        readable = LogReader.open(run_dir).cut().connect().sql("select count(*) from segments").fetchall() == [(1,)]
        try:
            LogWriter.open(run_dir, run="run", store=quick_store()).close()
            refusal = "none"
        except (MoltError, OSError) as error:
            refusal = f"{type(error).__name__}: {error}"
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    return {"readers work": readable, "writer": refusal}


def main() -> None:
    """Run both and keep the evidence."""
    with small_disk() as disk:
        full = fill_again_and_again(disk, step=512, most=90_000)
        print(full)
    with small_disk() as disk:
        closed = read_only(disk)
    claims = {
        "a full disk is refused in words and resumed": full["refused in words"] == full["resumed"] > 0,
        "nothing half-written is visible": full["something half-written visible"] == 0,
        "the log is sound at the end": full["findings at the end"] == 0,
        "a read-only log is read, and not written": closed["readers work"] and closed["writer"].startswith("LogFullError"),
    }
    print(closed, keep("log-faults-disk", {"full": full, "read-only": closed}, claims=claims))


if __name__ == "__main__":
    main()
