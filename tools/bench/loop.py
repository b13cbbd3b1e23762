"""The loop against its parts, in one run: rollout tokens/s beside the bare engine on the same calls, and the log's share of a step.

    python tools/bench/loop.py [--engine embedded|vllm] [--groups 64] [--steps 20]

Rollouts: a pool of workers runs agents and appends to a durable log; then the same model calls, id for id, go straight to the same
engine actor with as many in flight. Steps: a short run of the loop, whose step_trained events hold the seconds spent in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from molt.cli.programs import load_program
from molt.config import Config
from molt.data.prompts import PromptSet
from molt.driver.house import ray_session
from molt.log.actor import RaySink, start_log_actor, stop_log_actor
from molt.log.reader import LogReader
from molt.rollout.engine import Sampling
from molt.rollout.engine_actor import EngineHandle, launch_engine
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import engine_specs
from molt.rollout.tasks import GroupTask

LIMIT_S = 600.0


async def pool_tokens_per_s(config: Config, folder: Path, num_groups: int) -> tuple[float, list[tuple[np.ndarray, int]]]:
    """Sampled tokens/s of the pool over num_groups groups after a warm-up of four, and every model call: prompt ids, tokens sampled."""
    log = start_log_actor(folder, run="bench", attempt=1, store=config.log.store)
    pool = RolloutPool(config, sink=RaySink(log))
    prompts = PromptSet.load(str(config.data.prompt_dataset), config.data)
    try:
        await pool.start()
        await _roll_out(pool, config, prompts, range(4))
        begun = time.perf_counter()
        n_sampled = await _roll_out(pool, config, prompts, range(4, 4 + num_groups))
        seconds = time.perf_counter() - begun
        return n_sampled / seconds, _calls(LogReader.open(folder))
    finally:
        await pool.stop()
        stop_log_actor(log)


async def _roll_out(pool: RolloutPool, config: Config, prompts: PromptSet, places: range) -> int:
    size = config.rollout.n_samples_per_prompt
    tasks = [
        GroupTask(group_id=f"e0-p{i}", epoch=0, order_index=i, prompt=prompts[i], group_size=size, members=tuple(range(size)))
        for i in places
    ]
    await pool.dispatch(*tasks)
    return sum([done.n_sampled async for group in pool.results(LIMIT_S) for done in group.done])


def _calls(reader: LogReader) -> list[tuple[np.ndarray, int]]:
    """Every model call of the log but the warm-up's: the ids before each run of sampled tokens, and how many were sampled."""
    table = reader.cut().table("segments", ["lsn", "group_id", "token_ids", "spans"])
    calls = []
    for row in table.to_pylist():
        if int(row["group_id"].split("-p")[1]) < 4:
            continue
        at = 0
        for span in row["spans"]:
            if span["source"] == "policy":
                calls.append((np.asarray(row["token_ids"][:at], np.int32), span["len"]))
            at += span["len"]
    return calls


async def bare_tokens_per_s(config: Config, calls: Sequence[tuple[np.ndarray, int]]) -> float:
    """Tokens/s of one engine actor given the same calls, with as many in flight as the pool had."""
    handle = launch_engine(engine_specs(config)[0])
    await handle.start()
    free = asyncio.Semaphore(config.rollout.num_workers * config.rollout.max_concurrency)
    try:
        await asyncio.gather(*(_call(handle, free, config, f"warm-{i}", *call) for i, call in enumerate(calls[:16])))
        begun = time.perf_counter()
        counts = await asyncio.gather(*(_call(handle, free, config, f"bare-{i}", *call) for i, call in enumerate(calls)))
        return sum(counts) / (time.perf_counter() - begun)
    finally:
        await handle.stop()


async def _call(handle: EngineHandle, free: asyncio.Semaphore, config: Config, name: str, prompt: np.ndarray, length: int) -> int:
    async with free:
        sampling = Sampling(max_new_tokens=length, temperature=config.rollout.temperature, seed=hash(name) & 0x7FFFFFFF)
        generation = await handle.generate(name, prompt.tolist(), sampling)
        return len(generation.token_ids)


def step_figures(run_path: Path) -> dict[str, Any]:
    """Seconds of the steps of a run, summed but for the first two: in all, training, waiting, and at rest for the log."""
    table = LogReader.open(run_path).cut().table("events", ["lsn", "happened_at", "body"], where="kind = 'step_trained'")
    events = table.sort_by("lsn").to_pylist()
    span = events[-1]["happened_at"] - events[1]["happened_at"]
    steps = [json.loads(row["body"]) for row in events][2:]
    train, wait, log = (sum(step[name] for step in steps) for name in ("train_s", "wait_s", "log_s"))
    return {
        "num_steps": len(steps),
        "span_s": round(span, 3),
        "train_s": round(train, 3),
        "wait_s": round(wait, 3),
        "log_s": round(log, 3),
        "log_share": round(log / span, 4),
        "tokens_trained_per_s": round(sum(step["n_sampled"] for step in steps) / span, 1),
    }


async def measure(engine: str, num_groups: int, num_steps: int, flags: Sequence[str]) -> dict[str, Any]:
    """All figures of one run of this benchmark."""
    demo = load_program("demo")
    with tempfile.TemporaryDirectory(prefix="molt-bench-") as folder:
        world = Path(folder) / "world"
        demo.make_world(world)
        own = (f"--vllm.engine={engine}", f"--train.num_steps={num_steps}", *flags)
        config = demo.settings(world, runs=Path(folder) / "runs", name="steps", flags=own)
        with ray_session(config):
            pool, calls = await pool_tokens_per_s(config, Path(folder) / "rollouts", num_groups)
            bare = await bare_tokens_per_s(config, calls)
        await load_program("rl").main(config)
        return {
            "engine": engine,
            "num_calls": len(calls),
            "rollout_tokens_per_s": round(pool, 1),
            "bare_engine_tokens_per_s": round(bare, 1),
            "rollout_to_bare": round(pool / bare, 3),
            "steps": step_figures(Path(folder) / "runs" / "steps"),
        }


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="embedded", choices=("embedded", "vllm"))
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given, flags = parser.parse_known_args()
    figures = asyncio.run(measure(given.engine, given.groups, given.steps, flags)) | {"command": " ".join(sys.argv)}
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
