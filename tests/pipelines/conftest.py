"""The tiny world that loops are tested in, and the command line as a user calls it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280


def environment() -> dict[str, str]:
    """What a child process of a test starts with."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class World:
    """A tiny model, its task, and a folder for runs."""

    path: Path
    runs: Path

    def flags(self, name: str, **changes: Any) -> list[str]:
        """Settings of a short run: GRPO on four groups of four, generation one version ahead."""
        own = {
            "run.dir": self.runs,
            "run.name": name,
            "actor.model_name_or_path": self.path / "model",
            "actor.learning_rate": 3e-4,
            "data.prompt_dataset": self.path / "prompts.jsonl",
            "data.max_len": 96,
            "train.agent_path": ROOT / "examples" / "calculator_agent.py",
            "train.num_steps": 4,
            "train.batch_size": 16,
            "train.micro_batch_tokens": 512,
            "train.async_queue_size": 1,
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_new_tokens": 16,
            "rollout.max_turns": 4,
            "vllm.engine": "embedded",
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
        }
        merged = own | {key.replace("__", "."): value for key, value in changes.items()}
        return [f"--{key}={value}" for key, value in merged.items()]

    def run(self, name: str) -> Path:
        """Folder of a run."""
        return self.runs / name

    def molt(self, *words: str | Path, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Call the command line and wait for its end."""
        command = [sys.executable, "-m", "molt.cli", *map(str, words)]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit_s, check=False)

    def train(self, name: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        """Train a short run to its end."""
        done = self.molt("train", *self.flags(name, **changes))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def audit(self, name: str) -> dict[str, Any]:
        """The audit of a run, which must find nothing."""
        done = self.molt("audit", self.run(name), "--json")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(done.stdout)

    def sql(self, name: str, question: str) -> list[dict[str, Any]]:
        """Rows of a question over a run."""
        done = self.molt("sql", self.run(name), question, "--json")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(done.stdout)["rows"]

    def start(self, name: str, *words: str | Path) -> subprocess.Popen[bytes]:
        """Start the command line with its output in <runs>/<name>.out."""
        self.runs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "molt.cli", *map(str, words)]
        with (self.runs / f"{name}.out").open("wb") as out:
            return subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT)

    def output(self, name: str) -> str:
        """What a started command has printed."""
        return (self.runs / f"{name}.out").read_text(errors="replace")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One world for all tests, made by the product's own makers; the model knows the format and little else."""
    path = tmp_path_factory.mktemp("world")
    made = """
import sys
from pathlib import Path
from molt.data.tiny import make_model, make_prompts, make_warmup
from molt.learn.sft import warm_up
world = Path(sys.argv[1])
make_model(world / "model")
make_prompts(world / "prompts.jsonl", num_prompts=64)
make_warmup(world / "warmup.jsonl", num_conversations=2000)
warm_up(world / "model", world / "warmup.jsonl", num_steps=300, learning_rate=3e-3, batch_size=64)
"""
    subprocess.run([sys.executable, "-c", made, str(path)], env=environment(), check=True, timeout=LIMIT_S, capture_output=True)
    return World(path=path, runs=path / "runs")


@pytest.fixture(scope="session")
def trained(world: World) -> World:
    """A world with the finished asynchronous run `once`: six steps, with the trainer's rows on one rank."""
    world.train("once", train__num_steps=6)
    return world


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool], float, str], None]:
    """Wait until something holds, or fail naming it."""
    import time

    def wait(holds: Callable[[], bool], limit_s: float, what: str) -> None:
        ends = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < ends, f"waited {limit_s} s for {what}"
            time.sleep(0.2)

    return wait
