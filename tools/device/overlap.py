"""What the loop costs as a whole: steps async beside sync, the log's share of a step, phases of a refit, rollout while training.

python -m tools.device.overlap --limit-s 240 [--rehearse] [--tokens 512] [--ipc]

One run is opened once and its parts follow each other in it: async steps, then strictly on-policy ones, then the recorded plans again
while nothing is generated. A random model of Qwen3-0.6B's shape answers with a fixed number of tokens; engine and trainer stand on a
card each, or on one. What each half makes beside its plain counterpart is measured by tools.device.halves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.device.parts import ROOT, Parts, flags, parser
from tools.device.readings import interval, refits_of, steps_of
from tools.device.world import World, make_world

VOCAB_SIZE = 151_936
WARM_STEPS = 3
"""Steps at the start of a part that do not count."""
PHASES = ("pause_s", "transfer_s", "verify_s", "resume_s")


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=512, help="length of each answer")
    made.add_argument("--async-steps", type=int, default=8, help="steps that count")
    made.add_argument("--sync-steps", type=int, default=3, help="steps that count")
    made.add_argument("--cards", type=int, default=None, help="GPUs to use; what there is when absent")
    overlap = Overlap(made.parse_args())
    parts = overlap.parts
    if parts.run("world", overlap.make_world):
        overlap.run_all()
        parts.run("ratios", overlap.ratios)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Quiet:
    """The panel of a run that nobody watches."""

    def waiting(self, what: str) -> None:
        """Nothing."""

    def step(self, figures: Any) -> None:
        """One line."""
        names = ("step", "n_kept", "lag", "ready", "running", "train_s", "log_s", "wait_s")
        print(" ".join(f"{name}={figures[name]}" for name in names), flush=True)


class Overlap:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_rehearsal: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.engine = arguments.engine or ("embedded" if self.is_rehearsal else "vllm")
        self.parts = Parts("overlap", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.cards = _num_cards() if arguments.cards is None else arguments.cards
        self.is_apart = self.cards > 1
        self.world: World | None = None
        self.model: Path | None = None
        self.name = f"overlap-{time.strftime('%H%M%S')}"
        self.run_dir = self.work / "runs" / self.name
        self.plans: list[Any] = []
        self.ends: list[float] = []
        """When each step ended, seconds of the wall clock."""

    def make_world(self, facts: dict[str, Any]) -> None:
        """Prompts, and a model of real size with SmolLM2's tokenizer."""
        self.world = make_world(self.work, is_rehearsal=self.is_rehearsal)
        self.model = self.world.model
        if not self.is_rehearsal:
            from tools.device.models import make_dense_model

            self.model = make_dense_model(self.work / "qwen3-0.6b", vocab_size=VOCAB_SIZE)
            for file in self.world.model.iterdir():
                if not file.name.startswith(("model", "config", "pytorch")):
                    shutil.copy(file, self.model / file.name)
            _free_memory()
        facts |= {"model": str(self.model), "cards": self.cards, "is_apart": self.is_apart}

    def settings(self) -> dict[str, Any]:
        """Settings of the run: answers of full length, so that every step does the same work."""
        small, world = self.is_rehearsal, self.world
        assert world is not None, "the part `world` failed"
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "run.name": self.name,
            "actor.model_name_or_path": self.model,
            "actor.dtype": "float32" if small else "bfloat16",
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-6,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else self.arguments.tokens + 128,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": 1000,
            "train.batch_size": 8 if small else 128,
            "train.micro_batch_tokens": 512 if small else 16384,
            "train.weights_digest_interval": 0,
            "train.async_queue_size": 2,
            "train.partial_rollout_enable": True,
            "rollout.batch_size": 2 if small else 16,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 24 if small else self.arguments.tokens,
            "rollout.num_workers": 1 if small else 4,
            # Beyond what the engine runs at once, all that may be dispatched: a rollout keeps its place until the log has it.
            "rollout.max_concurrency": 16 if small else 192,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
            "ckpt.export": False,
            "log.seal": False,
            "vllm.engine": self.engine,
            "vllm.kv_on_refit": "keep",
            "vllm.max_num_seqs": 8 if small else 256,
            "placement.trainer": "apart" if self.is_apart and not small else "colocated",
        }
        if not small:
            transfer = "nccl" if self.is_apart else "ipc" if self.arguments.ipc else "file"
            own |= {"vllm.kv_cache_space_gib": 24, "vllm.compile": False, "vllm.gpu_memory_utilization": 0.3}
            own |= {"vllm.weight_transfer": transfer}
        return own

    # One run, part after part.

    def run_all(self) -> None:
        """Open the run, measure in it, close it."""
        run, stack = self.parts.run, AsyncExitStack()
        with asyncio.Runner() as runner:

            def wait(part: Coroutine[Any, Any, None], reserve_s: float = 15.0) -> None:
                runner.run(self.bounded(part, reserve_s))

            try:
                if run("open", lambda facts: wait(self.open(facts, stack)), needs_s=30 if self.is_rehearsal else 100):
                    run("async", lambda facts: wait(self.steps_async(facts)), needs_s=40)
                    run("sync", lambda facts: wait(self.steps_sync(facts)), needs_s=40)
                    run("steps", lambda facts: wait(self.steps_again(facts)), needs_s=30)
            finally:
                run("close", lambda facts: wait(stack.aclose(), reserve_s=0), needs_s=-60)

    async def bounded(self, part: Coroutine[Any, Any, None], reserve_s: float) -> None:
        """No part outlasts the program by more than it takes to stop it."""
        async with asyncio.timeout(max(30.0, self.parts.left_s - reserve_s)):
            await part

    async def open(self, facts: dict[str, Any], stack: AsyncExitStack) -> None:
        """Log, engine, workers, trainer, and the first refit."""
        from molt.agents.preflight import preflight
        from molt.cli.programs import load_program
        from molt.driver.house import open_house
        from molt.driver.leader import Leader
        from molt.runs import create_run
        from molt.settings import resolve

        self.config = config = resolve([], tuple(flags(self.settings())))
        known = preflight(config)
        self.rl = load_program("rl")
        num_steps = config.train.num_steps or 1
        house = open_house(config, create_run(config), num_steps=num_steps, say=lambda text: None)
        self.house = await stack.enter_async_context(house)
        self.leader = Leader(config, prompts=known.prompts, house=self.house, say=lambda text: None)
        self.step, self.clock = await self.rl.take_up(self.house, self.leader, Quiet(), num_steps)
        facts["devices"] = self.house.ranks.devices

    async def steps_async(self, facts: dict[str, Any]) -> None:
        """Steps of the run while the engine generates up to two versions ahead."""
        await self._train(facts, num_warm=WARM_STEPS, num_steps=self.arguments.async_steps)

    async def steps_sync(self, facts: dict[str, Any]) -> None:
        """The same run strictly on-policy: what was in flight is dropped as stale first."""
        leader = self.leader
        leader.config = leader.config.model_copy(update={"train": leader.config.train.model_copy(update={"async_queue_size": 0})})
        leader.inbox.rule = replace(leader.inbox.rule, max_lag=0)
        await self._train(facts, num_warm=2, num_steps=self.arguments.sync_steps)

    async def _train(self, facts: dict[str, Any], *, num_warm: int, num_steps: int) -> None:
        """Steps of the loop, and what they were."""
        from molt.driver.house import alongside

        house, leader, first = self.house, self.leader, len(self.ends)
        parts = ((house.ranks, "train"), (house.ranks, "publish_weights"), (house.pool, "refit"))
        phases = {name: _timed(part, name) for part, name in parts}
        async with alongside(leader.feed()):
            for _ in range(num_warm + num_steps):
                began = time.monotonic()
                plan = await leader.next_plan(
                    self.step, num_ranks=self.config.fsdp.num_shards, is_stopped=lambda: False, meanwhile=_nothing
                )
                assert plan is not None, "there are prompts left"
                await self.rl.train_step(house, leader, Quiet(), plan, self.clock, wait_s=time.monotonic() - began)
                self.step += 1
                self.plans.append(plan)
                self.ends.append(time.time())
        await leader.settled()
        facts |= self._figures(first + num_warm)
        facts["phases_s"] = {name: sum(taken[num_warm:]) / num_steps for name, taken in phases.items()}

    def _figures(self, first: int) -> dict[str, Any]:
        """Of the steps from `first` on: seconds from one step's end to the next, and tokens in that time."""
        ends, plans = self.ends[first - 1 :], self.plans[first:]
        steps, refits = steps_of(self.run_dir)[first:], refits_of(self.run_dir)[-len(plans) :]
        span, busy_s = ends[-1] - ends[0], sum(step["train_s"] for step in steps)
        n_tokens = sum(row.n_tokens for plan in plans for row in plan.segments)
        return {
            "num_steps": len(plans),
            "step_s": interval([later - earlier for earlier, later in itertools.pairwise(ends)]),
            **{name: interval([step[name] for step in steps])["mean"] for name in ("train_s", "wait_s", "log_s")},
            "log_share": sum(step["log_s"] for step in steps) / span,
            "refit": {name: interval([refit[name] for refit in refits])["mean"] for name in PHASES},
            "rollout_tokens_per_s": sampled_between(self.run_dir, ends[0], ends[-1]) / span,
            "trained_tokens_per_s": n_tokens / span,
            "trained_tokens_per_busy_s": n_tokens / busy_s,
        }

    async def steps_again(self, facts: dict[str, Any]) -> None:
        """The recorded plans again through the same ranks and the log, one after the other, while nothing is generated."""
        await self.house.pool.drain(5.0)
        ranks, plans = self.house.ranks, self.plans[-(WARM_STEPS + 8) :]
        ends, results = [], []
        for plan in plans:
            ranks.expect(plan)
            results.append(await ranks.train(plan, waits_for_log=False))
            ends.append(time.monotonic())
        await ranks.settle()
        n_tokens = sum(row.n_tokens for plan in plans[WARM_STEPS:] for row in plan.segments)
        seconds, count = ends[-1] - ends[WARM_STEPS - 1], len(plans) - WARM_STEPS
        facts |= {
            "num_steps": count,
            "tokens_per_s": n_tokens / seconds,
            "step_s": seconds / count,
            "train_s": sum(result.train_s for result in results[WARM_STEPS:]) / count,
            "read_share": sum(result.log_s for result in results[WARM_STEPS:]) / seconds,
        }

    def ratios(self, facts: dict[str, Any]) -> None:
        """What was to be shown."""

        def of(part: str, key: str) -> float:
            value = self.parts.facts.get(part, {}).get(key)
            value = value["mean"] if isinstance(value, dict) else value
            return float("nan") if value is None else float(value)

        facts |= {"async_to_sync_step": of("async", "step_s") / of("sync", "step_s"), "log_share": of("async", "log_share")}


def sampled_between(run_dir: Path, begin: float, end: float) -> int:
    """Tokens of training rollouts that ended in that time."""
    from molt.log.reader import LogReader

    where = f"purpose = 'train' and finished_at > {begin} and finished_at <= {end}"
    return int(sum(LogReader.open(run_dir).cut().table("segments", ["n_sampled"], where=where)["n_sampled"].to_pylist()))


def _timed(part: Any, name: str) -> list[float]:
    """Seconds of each call of a method from now on."""
    inner, taken = getattr(type(part), name), []

    async def call(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return await inner(part, *args, **kwargs)
        finally:
            taken.append(time.monotonic() - began)

    setattr(part, name, call)
    return taken


async def _nothing() -> None:
    """What is done while the trainer waits for rollouts."""


def _free_memory() -> None:
    """Give back what this process holds of the first card: a trainer and an engine come there."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _num_cards() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    raise SystemExit(main())
