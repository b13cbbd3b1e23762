"""The demo: a tiny model learns to call a calculator, asynchronously, through the log, in about three minutes on two cores."""

from __future__ import annotations

import json
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

from molt.audit.report import audit_run
from molt.cli.programs import load_program
from molt.config import Config
from molt.data.tiny import make_model, make_prompts, make_warmup
from molt.errors import MoltError
from molt.learn.sft import warm_up
from molt.log.reader import LogReader
from molt.places import folder
from molt.runs import open_run
from molt.settings import check, resolve
from molt.view.audit import print_audit

NUM_STEPS = 50
GAIN = 0.2
"""Least rise of the mean reward, last ten steps against the first ten."""


def settings(world: Path, *, runs: Path, name: str, flags: tuple[str, ...]) -> Config:
    """The demo's settings: GRPO on eight groups of eight, generation one version ahead; flags are laid over them."""
    own = {
        "run.dir": runs,
        "run.name": name,
        "actor.model_name_or_path": world / "model",
        "actor.learning_rate": 3e-4,
        "actor.weight_decay": 0.0,
        "data.prompt_dataset": world / "prompts.jsonl",
        "data.max_len": 96,
        "train.agent_path": folder("examples") / "calculator_agent.py",
        "train.num_steps": NUM_STEPS,
        "train.batch_size": 64,
        "train.async_queue_size": 1,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": 16,
        "rollout.max_turns": 4,
        "vllm.engine": "embedded",
        "algo.advantage.estimator": "grpo",
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_mode": "trunc",
        "ckpt.save_interval": 20,
    }
    return resolve([], (*(f"--{key}={value}" for key, value in own.items()), *flags))


def make_world(world: Path) -> None:
    """Make the model, its tokenizer and the task, and warm the model up by supervised steps until it is right about one time in three."""
    make_model(world / "model")
    make_prompts(world / "prompts.jsonl", num_prompts=1024)
    make_warmup(world / "warmup.jsonl", num_conversations=4000)
    warm_up(world / "model", world / "warmup.jsonl", num_steps=500, learning_rate=3e-3, batch_size=64)


async def main(*, runs: str = "runs", name: str | None = None, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make the world, train, audit, print the ledger. Returns what was seen; MoltError when the reward did not rise or an audit failed."""
    began = time.monotonic()
    name = name or f"demo-{secrets.token_hex(3)}"
    world = Path(runs).absolute() / f"{name}.world"
    config = settings(world, runs=Path(runs), name=name, flags=flags)
    check(config)
    print(f"making a tiny model and its task in {world}", flush=True)
    make_world(world)
    await load_program("rl").main(config)
    run = open_run(Path(config.run.dir) / str(config.run.name))
    rewards = rewards_by_step(LogReader.open(run.path))
    if not rewards:
        raise MoltError(f"the run was stopped before its first step; `molt train --resume {run.path}` goes on with it")
    seen = {
        "run": str(run.path),
        "num_steps": len(rewards),
        "reward_first_ten": statistics.fmean(rewards[:10]),
        "reward_last_ten": statistics.fmean(rewards[-10:]),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(f"mean reward of the first ten steps {seen['reward_first_ten']:.3f}, of the last ten {seen['reward_last_ten']:.3f}")
    report = audit_run(run.path)
    print_audit(report)
    print(f"took {seen['seconds']} s")
    if not report.is_well:
        raise MoltError(f"the audit of {run.path} found violations; see above")
    if seen["reward_last_ten"] - seen["reward_first_ten"] < GAIN and len(rewards) >= 20:
        raise MoltError(f"the mean reward rose by less than {GAIN}; the run is kept for a look: {run.path}")
    print(f"run: {run.path}")
    return seen


def rewards_by_step(reader: LogReader) -> list[float]:
    """Mean reward of each step that was trained, in order."""
    events = reader.cut().table("events", ["lsn", "step", "body"], where="kind = 'step_trained'").sort_by("lsn").to_pylist()
    by_step = {row["step"]: json.loads(row["body"])["reward_mean"] for row in events}
    return [by_step[step] for step in sorted(by_step)]
