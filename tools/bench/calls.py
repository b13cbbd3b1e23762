"""What a model call costs beside its tokens: an engine that answers at once, through its Ray actor; whole rollouts of one worker; and of
a pool as the driver has it, each process apart.

    python tools/bench/calls.py [--calls 2000] [--tokens 384] [--prompt 64]

Seconds of a processor are told beside calls per second, since on a small machine caller, actor and log writer share the cores.
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

from molt.config import Config
from molt.data.images import Image
from molt.data.prompts import PromptSet
from molt.data.tiny import make_model, make_prompts
from molt.driver.house import ray_session
from molt.log.actor import RaySink, start_log_actor, stop_log_actor
from molt.log.writer import LogWriter
from molt.places import folder
from molt.rollout.engine import EngineInfo, FinishReason, Generation, Sampling
from molt.rollout.engine_actor import EngineActor, EngineHandle
from molt.rollout.fleet import Fleet
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineSpec
from molt.rollout.tasks import GroupTask, RolloutDone, RolloutTask
from molt.rollout.worker import RolloutWorker
from molt.settings import resolve

IN_FLIGHT = 256
GROUP_SIZE = 8


class AtOnce:
    """An engine that has its tokens ready."""

    num_sampled = 0

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """max_new_tokens tokens that no tokenizer of this benchmark ends at."""
        count = sampling.max_new_tokens
        self.num_sampled += count
        none = np.zeros(count, np.int32)
        token_ids = np.arange(count, dtype=np.int32) % 64 + 16
        return Generation(
            token_ids=token_ids,
            logprobs=np.full(count, -1.0, np.float32),
            policy_versions=none,
            kv_versions=none,
            finish_reason=FinishReason.LENGTH,
        )

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""


class AtOnceActor(EngineActor):
    """The actor's own code around that engine."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._engine = AtOnce()  # type: ignore[assignment]

    async def cpu_s(self) -> float:
        """Processor seconds of its process."""
        return time.process_time()


async def through_actor(num_calls: int, num_prompt: int, num_tokens: int) -> dict[str, float]:
    """Calls per second of one engine actor, and what each costs on both sides."""
    import ray

    spec = EngineSpec(name="at-once", kind="embedded", model_path="none", dtype="float32", max_len=1 << 20)
    actor = ray.remote(AtOnceActor).options(num_cpus=0, max_concurrency=10_000).remote(spec)
    handle = EngineHandle(actor, spec)
    prompt, sampling, free = list(range(num_prompt)), Sampling(max_new_tokens=num_tokens), asyncio.Semaphore(IN_FLIGHT)

    async def call(name: str) -> None:
        async with free:
            await handle.generate(name, prompt, sampling)

    await asyncio.gather(*(call(f"warm-{number}") for number in range(IN_FLIGHT)))
    actor_s, caller_s, begun = await actor.cpu_s.remote(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(call(f"call-{number}") for number in range(num_calls)))
    seconds = time.perf_counter() - begun
    actor_ms = 1000 * (await actor.cpu_s.remote() - actor_s) / num_calls
    ray.kill(actor)
    return {
        "calls_per_s": round(num_calls / seconds),
        "calls_per_actor_cpu_s": round(1000 / actor_ms),
        "actor_cpu_ms": round(actor_ms, 3),
        "caller_cpu_ms": round(1000 * (time.process_time() - caller_s) / num_calls, 3),
    }


async def through_worker(num_rollouts: int, num_tokens: int, world: Path) -> dict[str, float]:
    """Rollouts per second of one worker: agent, template, capture, encoding and a durable log in the same process."""
    make_model(world / "model")
    make_prompts(world / "prompts.jsonl", num_prompts=64)
    config = _config(world, num_tokens, IN_FLIGHT)
    prompts, engine, free = PromptSet.load(str(world / "prompts.jsonl"), config.data), AtOnce(), asyncio.Semaphore(IN_FLIGHT)
    with LogWriter.open(world / "run", run="bench", attempt=1, store="durable") as writer:
        worker = RolloutWorker("worker", config, sink=writer)
        await worker.start()
        await worker.meet("at-once", engine)  # type: ignore[arg-type]

        async def roll_out(number: int) -> None:
            group = GroupTask(
                group_id=f"e0-p{number // GROUP_SIZE}", epoch=0, order_index=0, prompt=prompts[number // GROUP_SIZE % 64],
                group_size=GROUP_SIZE, members=tuple(range(GROUP_SIZE)),
            )  # fmt: skip
            task = RolloutTask(group=group, member=number % GROUP_SIZE, try_number=0, engine="at-once")
            async with free:
                outcome = await worker.run(task)
            if not isinstance(outcome, RolloutDone):
                raise RuntimeError(outcome.error)

        await asyncio.gather(*(roll_out(number) for number in range(IN_FLIGHT)))
        cpu_s, begun = time.process_time(), time.perf_counter()
        await asyncio.gather(*(roll_out(IN_FLIGHT + number) for number in range(num_rollouts)))
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
    return {"rollouts_per_s": round(num_rollouts / seconds), "cpu_ms_with_log": round(1000 * cpu_s / num_rollouts, 3)}


def _config(world: Path, num_tokens: int, num_places: int) -> Config:
    own = {
        "actor.model_name_or_path": world / "model",
        "data.prompt_dataset": world / "prompts.jsonl",
        "data.max_len": num_tokens + 128,
        "train.agent_path": folder("examples") / "calculator_agent.py",
        "rollout.max_new_tokens": num_tokens,
        "rollout.num_workers": 1,
        "rollout.max_concurrency": num_places,
        "vllm.engine": "embedded",
    }
    return resolve([], tuple(f"--{name}={value}" for name, value in own.items()))


async def through_pool(num_rollouts: int, num_tokens: int, world: Path) -> dict[str, float]:
    """Rollouts per second of a pool with one worker and a log actor, all sent at once, and what each costs in every process."""
    import ray

    config = _config(world, num_tokens, num_rollouts)
    prompts = PromptSet.load(str(world / "prompts.jsonl"), config.data)
    spec = EngineSpec(name="at-once", kind="embedded", model_path="none", dtype="float32", max_len=1 << 20)

    class Ready(EngineHandle):
        """Needs no start."""

        async def start(self) -> EngineInfo:
            return EngineInfo(name=self.name, kind="at-once", policy_version=0, max_len=1, vocab_size=1, weights_digest="none")

    def launch(spec: EngineSpec) -> EngineHandle:
        return Ready(ray.remote(AtOnceActor).options(num_cpus=0, max_concurrency=10_000).remote(spec), spec)

    log = start_log_actor(world / "pool", run="bench", attempt=1, store="process")
    pool = RolloutPool(config, sink=RaySink(log), fleet=Fleet([spec], launch))
    try:
        await pool.start()
        for name, count in (("warm", IN_FLIGHT), ("all", num_rollouts)):
            actors = {"worker": pool._crew._stations[0].actor, "engine": pool._fleet.berths["at-once"].handle._actor, "log": log}
            before, begun = _cpu_s(actors), time.perf_counter()
            tasks = [
                GroupTask(
                    group_id=f"{name}-p{number}", epoch=0, order_index=number, prompt=prompts[number % 64], group_size=GROUP_SIZE,
                    members=tuple(range(GROUP_SIZE)),
                )
                for number in range(count // GROUP_SIZE)
            ]  # fmt: skip
            await pool.dispatch(*tasks)
            done = sum([len(group.done) async for group in pool.results(600.0)])
            seconds, after = time.perf_counter() - begun, _cpu_s(actors)
    finally:
        await pool.stop()
        stop_log_actor(log)
    costs = {f"{name}_cpu_ms": round(1000 * (after[name] - before[name]) / done, 3) for name in before}
    return {"rollouts_per_s": round(done / seconds), **costs}


def _cpu_s(actors: dict[str, Any]) -> dict[str, float]:
    """Processor seconds of this process and of actors, all threads."""
    import ray

    asked = [actor.__ray_call__.remote(lambda _: time.process_time()) for actor in actors.values()]
    return {"driver": time.process_time(), **dict(zip(actors, ray.get(asked, timeout=60.0), strict=True))}


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--prompt", type=int, default=64)
    given = parser.parse_args()
    config = resolve([], ())
    with tempfile.TemporaryDirectory(prefix="molt-bench-") as world, ray_session(config):
        figures: dict[str, Any] = {
            "actor": asyncio.run(through_actor(given.calls, given.prompt, given.tokens)),
            "worker": asyncio.run(through_worker(given.calls, given.tokens, Path(world))),
            "pool": asyncio.run(through_pool(given.calls, given.tokens, Path(world))),
            "command": " ".join(sys.argv),
        }
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
