"""What the device programs share: parts that fail alone, a limit on time, JSON after each part, a table at the end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from molt import machine

ROOT = Path(__file__).resolve().parents[2]


PLACES = ("--work", "--out", "--tokenizer")
"""Flags that name a folder of the machine."""


class Parts:
    """The parts of one program. Each fills a dict of facts; an error in one is noted and the next goes on."""

    def __init__(self, name: str, out: Path, *, work: Path, limit_s: float) -> None:
        self.file = out / f"{name}.json"
        self.work = work
        self.logs = work / "logs" / name
        """What children print; kept as one archive beside the JSON."""
        self.began = time.monotonic()
        self.limit_s = limit_s
        self.facts: dict[str, dict[str, Any]] = {}
        self.head = {
            "program": name,
            "command": " ".join([f"python -m tools.device.{Path(sys.argv[0]).stem}", *without_places(sys.argv[1:])]),
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": machine.packages(),
            "hardware": machine.hardware(),
        }
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.limit_s - (time.monotonic() - self.began)

    def run(self, name: str, body: Callable[[dict[str, Any]], None], *, needs_s: float = 5.0) -> bool:
        """Run one part on a dict of its own; it is skipped when less than needs_s is left. True when it went well."""
        facts: dict[str, Any] = {}
        self.facts[name] = facts
        began = time.monotonic()
        print(f"[{began - self.began:6.1f} s] {name}", flush=True)
        if self.left_s < needs_s:
            facts["skipped"] = f"{self.left_s:.0f} s are left, it needs {needs_s:.0f}"
        else:
            try:
                body(facts)
            except Exception as error:
                facts["error"] = f"{type(error).__name__}: {error}"[:2000]
                facts["traceback"] = traceback.format_exc()[-4000:]
                print(facts["traceback"][-1200:], flush=True)
        facts["seconds"] = round(time.monotonic() - began, 2)
        self.save()
        return "error" not in facts and "skipped" not in facts

    def save(self) -> None:
        """Write everything known so far."""
        partial = self.file.with_suffix(".partial")
        text = json.dumps({**self.head, "seconds": round(time.monotonic() - self.began, 1), "parts": self.facts}, indent=1, default=str)
        for folder in (self.work, ROOT):
            text = text.replace(f"{folder}/", "")  # a record speaks of models and runs, not of where they lay
        partial.write_text(text)
        os.replace(partial, self.file)

    def table(self) -> None:
        """Print the facts, one line a part, and pack the logs."""
        print("\n== " + self.head["program"])
        for name, facts in self.facts.items():
            shown = ", ".join(f"{key}={_short(value)}" for key, value in facts.items() if key not in ("traceback", "seconds"))
            print(f"{name:24} {facts.get('seconds', 0):7.1f} s  {shown}"[:600])
        with tarfile.open(self.file.with_name(f"{self.file.stem}-logs.tgz"), "w:gz") as archive:
            for log in sorted(self.logs.glob("*.log")):
                archive.add(log, arcname=log.name)
        failed = [name for name, facts in self.facts.items() if "error" in facts]
        print(f"{len(self.facts)} parts, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}; {self.file}", flush=True)


def without_places(words: Sequence[str]) -> list[str]:
    """A command line without the folders that it was told."""
    kept, is_place = [], False
    for word in words:
        if not is_place and word not in PLACES:
            kept.append(word)
        is_place = word in PLACES
    return kept


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    return text if len(text) < 160 else text[:157] + "..."


class Child:
    """One command in a session of its own; its output goes to a file, and it is ended as a whole."""

    def __init__(self, command: Sequence[str], *, log: Path, env: dict[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.began = time.monotonic()
        merged = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1", **(env or {})}
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                list(command), cwd=ROOT, env=merged, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait(self, limit_s: float) -> int | None:
        """Exit code; past the limit it is interrupted (which drains), then killed, and None is returned."""
        try:
            return self.process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            self.keep_stacks()
            self.end()
            return None

    def keep_stacks(self) -> None:
        """Ask every engine and trainer process of the command what it does, and keep the ends of what they printed beside its output."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                title = (process.cmdline() or [""])[0]
                if title.startswith(("ray::RankProcess", "ray::EngineActor")):
                    process.send_signal(signal.SIGUSR1)
                    time.sleep(0.3)
                    printed = [*Path(tempfile.gettempdir()).glob(f"ray/session_*/logs/worker-*-{process.pid}.err")]
                    text = "".join(file.read_text(errors="replace")[-20_000:] for file in printed)
                    self.log.with_name(f"{self.log.stem}-{process.pid}.log").write_text(f"{title}\n{text}")

    def interrupt(self) -> None:
        """Ctrl-C for the command alone, not for what it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self, grace_s: float = 20.0) -> None:
        """Interrupt, wait, kill. Its whole session goes."""
        self.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)

    def tail(self, size: int = 1500) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-size:]


def molt(*words: str) -> list[str]:
    """A molt command line."""
    return [sys.executable, "-m", "molt.cli", *words]


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as flags."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What every device program takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "runs/device"), help="folder for JSON and logs")
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "molt-device", help="folder for models and runs")
    made.add_argument("--limit-s", type=float, default=480.0, help="total time")
    made.add_argument("--rehearse", action="store_true", help="tiny model, CPU, few steps")
    made.add_argument("--engine", choices=["vllm", "embedded"], default=None, help="vllm on a GPU, embedded in a rehearsal, when absent")
    made.add_argument(
        "--tokenizer", type=Path, default=None, help="folder of a tokenizer and its config.json; SmolLM2's, from the kit, when absent"
    )
    made.add_argument("--ipc", action="store_true", help="refits over CUDA handles instead of a file")
    return made
