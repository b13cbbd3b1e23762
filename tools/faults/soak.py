"""A whole run under attack: processes of every kind killed at random times, resumed until it is done, then audited and replayed.

python -m tools.faults.soak --kills 40 --steps 400 --work DIR [--seed 0] [--engine vllm --mean-s 20]

Each blow goes to an engine, the core of a vLLM engine, a rollout worker, a trainer rank, the log actor or the driver (kill -9), or is one
Ctrl-C. A run that stops is resumed. At the end every invariant is empty, the ledger closes, every row that was ever seen is there
unchanged, and the steps replay bit for bit. A run that neither goes on nor stops is the finding that the soak is for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tools.device.kills import Killer, rows_of
from tools.device.parts import ROOT, Child, flags, molt
from tools.device.readings import events_of, steps_of
from tools.device.world import make_world
from tools.faults.evidence import keep

BLOWS = {"engine": 3, "worker": 3, "rank": 1, "log": 1, "driver": 1, "interrupt": 1}
"""Whom a blow hits, and how often beside the others."""
CORE = {"core": 3}
"""And where engines are vLLM's."""
TITLES = {
    "engine": "ray::EngineActor",
    "core": "VLLM::EngineCore",
    "worker": "ray::RolloutWorker",
    "rank": "ray::RankProcess",
    "log": "ray::_LogActor",
}
ENDS = (0, 1, 3, 130, -signal.SIGKILL)
"""Exit codes of a run that was struck: drained, ended by name, stalled, stopped, killed."""
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They notice within about 70 s that their parent is gone."""
STUCK_S = 240.0
"""Without a new event in the log and without an end."""


def main() -> int:
    """0 when every claim held."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--work", type=Path, required=True, help="folder for the model and the run")
    made.add_argument("--kills", type=int, default=40)
    made.add_argument("--steps", type=int, default=400)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    made.add_argument("--mean-s", type=float, default=6.0, help="between two blows, and from the start of an attempt to the first")
    soak = Soak(made.parse_args())
    try:
        soak.run()
        claims = soak.judge()
    finally:
        soak.end()
    print(json.dumps(soak.figures, indent=1))
    print(json.dumps(claims, indent=1))
    keep("log-faults-soak" if soak.arguments.engine == "embedded" else "log-faults-soak-vllm", soak.figures, claims=claims)
    return int(not all(claims.values()))


class Soak:
    """One run, its attempts and the blows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work
        self.random = random.Random(arguments.seed)
        self.choices = BLOWS | (CORE if arguments.engine == "vllm" else {})
        self.name = f"soak-{time.strftime('%H%M%S')}"
        self.run_dir = self.work / "runs" / self.name
        self.child: Child | None = None
        self.blows: Counter[str] = Counter()
        self.num_at_start = 0
        """Blows before the first event of their attempt."""
        self.attempts: list[dict[str, Any]] = []
        self.seen: dict[str, dict[Any, str]] = {}
        self.left_behind: list[str] = []
        self.figures: dict[str, Any] = {"steps": arguments.steps, "seed": arguments.seed, "engine": arguments.engine}

    def run(self) -> None:
        """Attempt after attempt until the last step is made."""
        while True:
            is_first = not self.attempts
            words = molt("train", *flags(self.settings())) if is_first else molt("train", "--resume", str(self.run_dir))
            number = len(self.attempts)
            self.child = Child(words, log=self.work / "logs" / f"{self.name}-{number}.log")
            outcome = self.attack(self.child)
            self.attempts.append(outcome | {"steps": len(steps_of(self.run_dir))})
            print(f"attempt {number}: {self.attempts[-1]}", flush=True)
            if outcome["exit_code"] == 0 and len(steps_of(self.run_dir)) >= self.arguments.steps:
                return
            if outcome["exit_code"] not in ENDS:
                raise RuntimeError(f"attempt {number} left with {outcome['exit_code']}: {self.child.tail()}")
            if not outcome["blows"]:
                raise RuntimeError(f"attempt {number} ended by itself, nobody was struck: {self.child.tail()}")

    def attack(self, child: Child) -> dict[str, Any]:
        """Blows until the attempt ends; how it ended."""
        began, told, is_started = time.monotonic(), self.num_events(), False
        last, due = began, began + self.random.expovariate(1 / self.arguments.mean_s)
        struck: list[str] = []
        while child.process.poll() is None:
            time.sleep(0.25)
            now, events = time.monotonic(), self.num_events()
            if events != told:
                last, told, is_started = now, events, True
            if now - last > STUCK_S:
                child.keep_stacks()
                raise RuntimeError(f"stuck after {struck[-2:]}: {child.tail()}")
            if now >= due and self.blows.total() < self.arguments.kills:
                due = now + self.random.expovariate(1 / self.arguments.mean_s)
                if (blow := self.strike(child)) is not None:
                    struck.append(blow)
                    self.num_at_start += not is_started
        self.bury()
        return {"exit_code": child.process.returncode, "blows": struck, "seconds": round(time.monotonic() - began, 1)}

    def strike(self, child: Child) -> str | None:
        """One blow; None when nobody of that kind was there."""
        self.look()
        blow = self.random.choices(list(self.choices), list(self.choices.values()))[0]
        if blow in TITLES:
            victims = Killer(child).find(TITLES[blow])
            if not victims:
                return None
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(self.random.choice(victims).pid, signal.SIGKILL)
        else:
            child.process.send_signal(signal.SIGINT if blow == "interrupt" else signal.SIGKILL)
        self.blows[blow] += 1
        return blow

    def bury(self) -> None:
        """What an attempt left behind has to end by itself; what does not is named, and ended here."""
        assert self.child is not None
        ends = time.monotonic() + 60
        while (left := _session(self.child)) and time.monotonic() < ends:
            time.sleep(0.5)
        self.left_behind += left
        self.child.end(grace_s=1.0)

    def look(self) -> None:
        """Note the rows that readers see now."""
        if self.num_events():
            for table, rows in rows_of(self.run_dir).items():
                self.seen.setdefault(table, {}).update(rows)

    def num_events(self) -> int:
        """Rows of the log's table of events; 0 before there is a log."""
        from molt.errors import MoltError
        from molt.log.reader import LogReader

        try:
            return int(LogReader.open(self.run_dir).cut().table("events", ["lsn"]).num_rows)
        except (MoltError, OSError, ValueError):
            return 0

    def judge(self) -> dict[str, bool]:
        """The claims, on what is left."""
        now = rows_of(self.run_dir)
        lost = {table: sum(now[table].get(place) != digest for place, digest in rows.items()) for table, rows in self.seen.items()}
        steps = {body["step"] for body in events_of(self.run_dir, "step_trained")}
        audit = Child(molt("audit", str(self.run_dir), "--json"), log=self.work / "logs" / f"{self.name}-audit.log")
        audited = audit.wait(300)
        replay = Child(molt("replay", str(self.run_dir)), log=self.work / "logs" / f"{self.name}-replay.log")
        replayed = replay.wait(900)
        self.figures |= {
            "blows": dict(self.blows),
            "blows_at_start": self.num_at_start,
            "attempts": len(self.attempts),
            "left_behind": self.left_behind,
            "rows_seen": {table: len(rows) for table, rows in self.seen.items()},
            "rows_lost_or_changed": lost,
            "seconds": round(sum(attempt["seconds"] for attempt in self.attempts), 1),
            "audit": "well" if audited == 0 else audit.tail(1500),
            "replay": "bit for bit" if replayed == 0 else replay.tail(1500),
        }
        return {
            "the run is done whoever is killed": steps == set(range(self.arguments.steps)),
            "no row that was seen is lost or changed": not any(lost.values()),
            "every invariant is empty and the ledger closes": audited == 0,
            "every step replays bit for bit": replayed == 0,
            "nothing is left behind": not self.left_behind,
        }

    def end(self) -> None:
        """Whatever still runs ends."""
        if self.child is not None and self.child.process.poll() is None:
            self.child.end()

    def settings(self) -> dict[str, Any]:
        """A tiny model that rolls out and trains at once, with a checkpoint every few steps."""
        world = make_world(self.work, is_rehearsal=True)
        return {
            "run.dir": self.work / "runs",
            "run.name": self.name,
            "actor.model_name_or_path": world.model,
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-4,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": self.arguments.steps,
            "train.batch_size": 8,
            "train.micro_batch_tokens": 512,
            "train.async_queue_size": 2,
            "train.partial_rollout_enable": True,
            "train.deterministic": True,
            "rollout.batch_size": 2,
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_new_tokens": 48,
            "rollout.num_workers": 2,
            "rollout.max_concurrency": 16,
            "rollout.num_tries": 8,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
            "ckpt.save_interval": 3,
            "ckpt.export": False,
            "vllm.engine": self.arguments.engine,
            "vllm.num_engines": 2,
            "vllm.request_timeout_s": 60,
            "vllm.refit_timeout_s": 60,
        }


def _session(child: Child) -> list[str]:
    """Titles of the processes of the command's session that still run, those aside that Ray ends by itself."""
    found = []
    for process in psutil.process_iter(["pid", "status", "cmdline"]):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            title = " ".join(process.info["cmdline"] or ["?"]).strip()
            is_dead = process.info["status"] == psutil.STATUS_ZOMBIE or title.startswith(RAYS_OWN)
            if os.getsid(process.pid) == child.process.pid and not is_dead:
                found.append(title[:60])
    return found


if __name__ == "__main__":
    sys.exit(main())
