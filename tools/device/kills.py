"""kill -9 on the card: the engine's core and its actor in the middle of answers, the trainer in a step; then resume and audit.

python -m tools.device.kills --limit-s 240 [--rehearse] [--engine vllm]

One run with two engines side by side. Each kill is preceded by a look at the log: every row that is there then must be there at the
end, under the same digest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tools.device.models import make_dense_model
from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.readings import events_of, steps_of
from tools.device.world import World, make_world

CORE = "EngineCore"
ENGINE = "ray::EngineActor"
RANK = "ray::RankProcess"


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=16)
    kills = Kills(made.parse_args())
    parts = kills.parts
    if parts.run("world", kills.make_world):
        if parts.run("start", kills.start, needs_s=60):
            parts.run("engine", lambda facts: kills.kill_engine(facts, is_core=kills.has_core), needs_s=20)
            parts.run("engine_actor", lambda facts: kills.kill_engine(facts, is_core=False), needs_s=60 if kills.is_rehearsal else 230)
            parts.run("trainer", kills.kill_trainer, needs_s=20)
        kills.end()
        parts.run("resume", kills.resume, needs_s=60)
        parts.run("audit", kills.audit)
        parts.run("rows", kills.rows)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Killer:
    """Finds and kills the processes that one command started, and no others."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def find(self, title: str) -> list[psutil.Process]:
        """Processes below the command whose title begins so, oldest first."""
        try:
            below = psutil.Process(self.child.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return sorted((process for process in below if _title(process).startswith(title)), key=_started)

    def kill_engine(self, *, is_core: bool) -> dict[str, Any]:
        """Kill the engine that runs longest: the core of vLLM below its actor, or the actor itself."""
        engines = self.find(ENGINE)
        assert engines, "no engine is there to be killed"
        if not is_core:
            return self.kill(engines[0])
        below = sorted(engines[0].children(recursive=True), key=lambda process: process.memory_info().rss)
        return self.kill(next((process for process in below if CORE in _title(process)), below[-1]))

    def kill_rank(self, limit_s: float) -> dict[str, Any]:
        """Kill a trainer rank in the middle of a step: Ray names the method that a process runs in its title."""
        killed: dict[str, Any] = {}
        ranks = self.find(RANK)

        def is_killed() -> bool:
            training = next((rank for rank in ranks if _title(rank).startswith(f"{RANK}.train")), None)
            if training is not None:
                killed.update(self.kill(training))
            return training is not None

        assert wait_until(is_killed, limit_s, every_s=0.001), f"no rank of {len(ranks)} was seen in a step within {limit_s:g} s"
        return killed

    def kill(self, victim: psutil.Process) -> dict[str, Any]:
        """kill -9."""
        title = _title(victim)
        os.kill(victim.pid, signal.SIGKILL)
        return {"title": title.strip()[:60], "pid": victim.pid, "at": time.time()}


def _started(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return time.time()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


def wait_until(holds: Callable[[], bool], limit_s: float, *, every_s: float = 0.25) -> bool:
    """Wait until something holds; False when it does not within the limit."""
    ends = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(every_s)
    return True


class Kills:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_rehearsal: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.engine = arguments.engine or ("embedded" if self.is_rehearsal else "vllm")
        self.has_core = self.engine == "vllm"
        self.parts = Parts("kills", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.world: World | None = None
        self.model: Path | None = None
        self.child: Child | None = None
        self.name = f"kills-{time.strftime('%H%M%S')}"
        self.run_dir = self.work / "runs" / self.name
        self.seen: dict[str, dict[Any, str]] = {"segments": {}, "events": {}, "consumption": {}, "scores": {}}
        """Rows that were there before some kill: place in the log to digest."""

    def make_world(self, facts: dict[str, Any]) -> None:
        """Prompts, and a random model whose answers always run to their limit."""
        self.world = make_world(self.work, is_rehearsal=self.is_rehearsal)
        self.model = self.world.model
        if not self.is_rehearsal:
            small = {"hidden_size": 512, "num_layers": 8, "ffn_size": 1536}
            self.model = make_dense_model(self.work / "dense-small", **small, tokenizer=self.world.model)
        facts["model"] = str(self.model)

    def settings(self) -> dict[str, Any]:
        """Settings of the run: long answers, so that every kill finds some in flight."""
        small, world = self.is_rehearsal, self.world
        assert world is not None, "the part `world` failed"
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "run.name": self.name,
            "actor.model_name_or_path": self.model,
            "actor.dtype": "float32" if small else "bfloat16",
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-5,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else 512,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": self.arguments.steps,
            "train.batch_size": 8 if small else 64,
            "train.micro_batch_tokens": 512 if small else 16384,
            "train.async_queue_size": 1,
            "train.partial_rollout_enable": True,
            "rollout.batch_size": 2 if small else 8,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 96 if small else 384,
            "rollout.max_concurrency": 256,
            "rollout.num_tries": 4,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
            "ckpt.save_interval": 4,
            "ckpt.export": False,
            "vllm.engine": self.engine,
            "vllm.num_engines": 1 if small and self.engine == "vllm" else 2,
            "vllm.request_timeout_s": 60,
            "vllm.refit_timeout_s": 60,
            "placement.trainer": "colocated",
        }
        if not small:
            own |= {"vllm.enforce_eager": True, "vllm.kv_cache_space_gib": 4, "vllm.gpu_memory_utilization": 0.15}
        return own

    def start(self, facts: dict[str, Any]) -> None:
        """Start the run and let it make two steps."""
        self.child = Child(molt("train", *flags(self.settings())), log=self.parts.logs / "kills-first.log")
        self._steps(2, min(240.0, self.parts.left_s - 90))
        facts["started_s"] = round(time.monotonic() - self.child.began, 1)

    @property
    def the_child(self) -> Child:
        """The command under attack."""
        assert self.child is not None, "the part `start` comes first"
        return self.child

    def kill_engine(self, facts: dict[str, Any], *, is_core: bool) -> None:
        """Kill an engine while it answers; the run must go on by itself."""
        before, failed = len(steps_of(self.run_dir)), len(events_of(self.run_dir, "rollout_failed"))
        self._look()
        facts["killed"] = Killer(self.the_child).kill_engine(is_core=is_core)
        began = time.monotonic()
        self._steps(before + 2, min(120.0, self.parts.left_s - 60))
        told = events_of(self.run_dir, "rollout_failed")[failed:]
        facts |= {
            "two_steps_more_after_s": round(time.monotonic() - began, 1),
            "num_rollouts_tried_again": len(told),
            "reasons": sorted({body["reason"] for body in told}),
            "says": next((body["error"][:200] for body in told), None),
            "was_mid_generation": bool(told),
        }
        if not told:
            raise AssertionError("no rollout failed: the engine was not in the middle of an answer")

    def kill_trainer(self, facts: dict[str, Any]) -> None:
        """Kill the rank while it trains; the run must stop and say why."""
        self._look()
        facts["killed"] = Killer(self.the_child).kill_rank(min(60.0, self.parts.left_s - 60))
        began = time.monotonic()
        facts["exit_code"] = self.the_child.wait(min(90.0, self.parts.left_s - 50))
        facts |= {"ended_after_s": round(time.monotonic() - began, 1), "num_steps": len(steps_of(self.run_dir))}
        ended = events_of(self.run_dir, "attempt_ended")
        facts["says"] = ended[-1]["error"] if ended else None
        if facts["exit_code"] in (0, None) or not ended or "trainer rank" not in str(facts["says"]):
            raise AssertionError(f"the run did not stop with a named cause: {facts['exit_code']}, {ended}; {self.the_child.tail()}")

    def end(self) -> None:
        """Whatever still runs ends now."""
        if self.child is not None and self.child.process.poll() is None:
            self.child.end()

    def resume(self, facts: dict[str, Any]) -> None:
        """Go on from the newest checkpoint and the log, to the last step."""
        self._look()
        child = Child(molt("train", "--resume", str(self.run_dir)), log=self.parts.logs / "kills-resumed.log")
        facts["exit_code"] = child.wait(self.parts.left_s - 20)
        facts["wall_s"] = round(time.monotonic() - child.began, 1)
        started = events_of(self.run_dir, "attempt_started")[-1]
        facts |= {name: started[name] for name in ("resumed_from_step", "resumed_from_checkpoint")}
        steps = [body["step"] for body in events_of(self.run_dir, "step_trained")]
        facts |= {"num_steps": len(set(steps)), "num_trained_again": len(steps) - len(set(steps))}
        if facts["exit_code"] != 0 or set(steps) != set(range(self.arguments.steps)):
            raise RuntimeError(f"molt train --resume ended with {facts['exit_code']} after steps {sorted(set(steps))}: {child.tail()}")

    def audit(self, facts: dict[str, Any]) -> None:
        """Every invariant is empty and the token ledger closes."""
        child = Child(molt("audit", str(self.run_dir), "--json"), log=self.parts.logs / "kills-audit.log")
        facts["exit_code"] = child.wait(60)
        text = child.log.read_text()
        report = json.loads(text[text.index("{") : text.rindex("}") + 1]) if "{" in text else {}
        ledger = {line["fate"]: line["n_tokens"] for line in report.get("ledger", []) if line["fate"] == "generated"}
        rest = sum(line["n_tokens"] for line in report.get("ledger", []) if line["fate"] != "generated")
        facts |= {"num_invariants": len(report.get("invariants", [])), "is_well": report.get("is_well"), **ledger, "accounted": rest}
        if facts["exit_code"] != 0 or facts.get("generated") != rest:
            raise AssertionError(child.tail())

    def rows(self, facts: dict[str, Any]) -> None:
        """Every row that was there before a kill is there now, unchanged."""
        now = rows_of(self.run_dir)
        lost = {
            table: len([place for place, digest in rows.items() if now[table].get(place) != digest]) for table, rows in self.seen.items()
        }
        facts |= {"num_seen": {table: len(rows) for table, rows in self.seen.items()}, "num_lost_or_changed": lost}
        if any(lost.values()) or not self.seen["segments"]:
            raise AssertionError(f"rows are lost or changed: {lost}")

    def _look(self) -> None:
        """Note the rows that are there: readers see acknowledged and committed rows alike, so this is at least what was acknowledged."""
        for table, rows in rows_of(self.run_dir).items():
            self.seen[table] |= rows

    def _steps(self, number: int, limit_s: float) -> None:
        child = self.the_child
        wait_until(lambda: len(steps_of(self.run_dir)) >= number or child.process.poll() is not None, limit_s)
        if len(steps_of(self.run_dir)) < number:
            raise RuntimeError(f"{len(steps_of(self.run_dir))} steps of {number} within {limit_s:.0f} s: {child.tail()}")


def rows_of(run_dir: Path) -> dict[str, dict[Any, str]]:
    """Digest of every row by its place in the log."""
    from molt.log.reader import LogReader

    cut = LogReader.open(run_dir).cut()
    found: dict[str, dict[Any, str]] = {}
    for table in ("segments", "events", "consumption", "scores"):
        rows = cut.table(table, ["lsn", "digest"])
        digests = [value.hex() for value in rows.column("digest").to_pylist()]
        found[table] = dict(zip(rows.column("lsn").to_pylist(), digests, strict=True))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
