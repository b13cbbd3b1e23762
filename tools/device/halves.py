"""Each half of the loop beside its plain counterpart on one card: rollouts beside vLLM alone, training beside a bare FSDP2 loop.

python -m tools.device.halves training --limit-s 150 [--rehearse]
python -m tools.device.halves rollouts --limit-s 190 [--rehearse] [--tokenizer FOLDER]

training   recorded rows -> the rank as the loop runs it, log and all -> tokens/s  |  the same packed rows -> bare loop -> tokens/s, MFU
rollouts   prompts -> pool, workers, agent, engine, log -> tokens/s                |  the same calls at once -> vLLM alone -> tokens/s

Both sides of a ratio follow each other in one program, with the same rows or calls, after as many steps, or calls
enough to fill the engine, that do not count. The model is a random one of Qwen3-0.6B's shape.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tools.device.bare import BareEngine, bare_steps
from tools.device.made import PROMPT, made_plan, made_segment
from tools.device.parts import ROOT, Parts, flags, parser
from tools.device.world import World, make_world

VOCAB_SIZE = 151_936
WARM_STEPS = 3
"""Steps at the start that do not count."""
WAVES = 4
"""Times that the engine is filled."""
MOST_TURNS = 12
"""Times that both sides of the rollouts are measured, where the time allows."""
CLOSE_S = 15.0
"""Time kept for the end of engines and workers."""


def main() -> int:
    """One half; 0 when nothing failed."""
    made = parser(__doc__)
    made.add_argument("half", choices=["training", "rollouts"])
    made.add_argument("--tokens", type=int, default=384, help="length of each answer")
    made.add_argument("--steps", type=int, default=8, help="steps that count")
    arguments = made.parse_args()
    half = Training(arguments) if arguments.half == "training" else Rollouts(arguments)
    half.run()
    half.parts.table()
    return int(any("error" in facts for facts in half.parts.facts.values()))


class Half:
    """What both have in common."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.is_small: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.parts = Parts(f"halves-{arguments.half}", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.vocab_size = 512 if self.is_small else VOCAB_SIZE
        self.n_sampled = 24 if self.is_small else arguments.tokens
        self.group_size = 4 if self.is_small else 8

    def make_model(self) -> Path:
        """The random model, without a tokenizer."""
        from tools.device.models import make_dense_model

        sizes = {"hidden_size": 128, "num_layers": 2, "ffn_size": 256, "dtype": "float32"} if self.is_small else {}
        return make_dense_model(self.work / "qwen3-random", vocab_size=self.vocab_size, **sizes)

    def common(self, model: Path) -> dict[str, Any]:
        """Settings of both."""
        return {
            "actor.model_name_or_path": model,
            "actor.dtype": "float32" if self.is_small else "bfloat16",
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-6,
            "data.max_len": 160 if self.is_small else self.n_sampled + 128,
            "train.micro_batch_tokens": 512 if self.is_small else 16384,
            "train.weights_digest_interval": 0,
            "rollout.n_samples_per_prompt": self.group_size,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
        }


class Training(Half):
    """A rank alone, as the loop runs it."""

    def run(self) -> None:
        """All parts."""
        if self.parts.run("rows", self.rows) and self.parts.run("steps", self.steps, needs_s=20):
            self.parts.run("bare_loop", self.bare, needs_s=15)
            self.parts.run("ratios", self.ratios)

    def rows(self, facts: dict[str, Any]) -> None:
        """A log with the rollouts of all steps, and their plans."""
        from molt.log.producer import Producer
        from molt.log.reader import LogReader
        from molt.log.writer import LogWriter
        from molt.settings import resolve

        self.config = resolve([], tuple(flags(self.common(self.make_model()))))
        folder = self.work / f"rows-{time.strftime('%H%M%S')}"
        self.writer = LogWriter.open(folder, run="rows", attempt=1, store="process")
        self.reader = LogReader.open(folder)
        generator = np.random.default_rng(0)
        producer = Producer(self.writer, "made")
        per_step, num_steps = (8, 4) if self.is_small else (128, WARM_STEPS + self.arguments.steps)
        kind = {"vocab_size": self.vocab_size, "n_sampled": self.n_sampled, "group_size": self.group_size}
        self.plans = []
        for step in range(num_steps):
            segments = [made_segment(generator, step * per_step + number, **kind) for number in range(per_step)]
            producer.append_sync(segments=segments)
            self.plans.append(made_plan(segments, step, num_ranks=1, micro_batch_tokens=self.config.train.micro_batch_tokens))
        facts |= {"num_steps": num_steps, "rows_per_step": per_step, "tokens_per_row": PROMPT + self.n_sampled}

    def steps(self, facts: dict[str, Any]) -> None:
        """Rows read ahead from the log, scored, gated, learned from; scores and gate decisions into the log."""
        import torch

        from molt.learn.alone import alone
        from molt.learn.journal import LogJournal
        from molt.learn.model import load_model
        from molt.learn.policy import Policy
        from molt.learn.rank import PolicyRank
        from molt.log.producer import Producer

        config = self.config
        with alone() as mesh:
            scorer = load_model(str(config.actor.model_name_or_path), config.actor, config.fsdp, is_deferred=True)
            policy = Policy(scorer, config.actor, config.fsdp, mesh=mesh, num_steps=len(self.plans))
            journal = LogJournal(config, self.reader, Producer(self.writer, "rank"))
            rank = PolicyRank(config, policy, journal, rank=0)
            results, ends = [], []
            for plan, following in itertools.pairwise([*self.plans, self.plans[-1]]):
                journal.expect([row.segment_id for row in following.segments])
                results.append(rank.train(plan, waits_for_log=False))
                rank.release()
                ends.append(time.perf_counter())
            rank.settle()
            if refused := [result.refused for result in results if result.refused is not None]:
                raise RuntimeError(f"{len(refused)} steps were refused, the first with {refused[0]}")
            if policy.device.type == "cuda":
                facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            del scorer, policy, rank
        self.writer.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        warm = 1 if self.is_small else WARM_STEPS
        n_tokens = sum(row.n_tokens for plan in self.plans[warm:] for row in plan.segments)
        seconds, counted = ends[-1] - ends[warm - 1], results[warm:]
        facts |= {
            "num_steps": len(counted),
            "tokens_per_s": n_tokens / seconds,
            "step_s": seconds / len(counted),
            "train_s": sum(result.train_s for result in counted) / len(counted),
            "read_share": sum(result.log_s for result in counted) / seconds,
        }

    def bare(self, facts: dict[str, Any]) -> None:
        """The same packed rows in memory: forward, cross-entropy, backward, clip, AdamW."""
        import torch

        facts |= bare_steps(self.config, self.plans, self.reader, 1 if self.is_small else WARM_STEPS)
        if torch.cuda.is_available():
            facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)

    def ratios(self, facts: dict[str, Any]) -> None:
        """What was to be shown."""
        ours, bare = self.parts.facts["steps"], self.parts.facts["bare_loop"]
        ratio = ours["tokens_per_s"] / bare["tokens_per_s"]
        facts |= {"training_to_bare": ratio, "training_mfu": ratio * bare["mfu"], "bare_mfu": bare["mfu"]}


class Rollouts(Half):
    """The pool as the loop runs it, while nothing trains."""

    def run(self) -> None:
        """All parts."""
        run, stack = self.parts.run, AsyncExitStack()
        if not run("world", self.world):
            return
        with asyncio.Runner() as runner:
            try:
                if run("start", lambda facts: runner.run(self.start(facts, stack)), needs_s=20 if self.is_small else 90):
                    self.take_turns(lambda facts, name: runner.run(self.pool(facts, name)))
                    run("ratios", self.ratios, needs_s=0)
            finally:
                self.bare.end()
                run("close", lambda facts: runner.run(stack.aclose()), needs_s=-60)

    def take_turns(self, pool: Callable[[dict[str, Any], str], None]) -> None:
        """Both sides as often as the time allows, each first in every second turn: what drifts on the host meets both alike."""
        longest = 10.0
        for turn in range(MOST_TURNS):
            sides = {"alone": self.alone, "pool": lambda facts, turn=turn: pool(facts, f"pool{turn}")}
            if self.parts.left_s < 2.2 * longest + CLOSE_S:
                return
            for name in sorted(sides, reverse=turn % 2 == 1):
                if not self.parts.run(f"{name}_{turn}", sides[name]):
                    return
                longest = max(longest, self.parts.facts[f"{name}_{turn}"]["seconds"])

    def world(self, facts: dict[str, Any]) -> None:
        """Prompts, the model, a tokenizer, and the calls that both sides make."""
        from molt.agents.preflight import preflight
        from molt.settings import resolve

        world = self._world()
        concurrency = 8 if self.is_small else 256
        own: dict[str, Any] = {
            "data.prompt_dataset": world.prompts,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.batch_size": self.group_size * 2,
            "rollout.batch_size": 2,
            "rollout.max_new_tokens": self.n_sampled,
            "rollout.num_workers": 1 if self.is_small else 4,
            "rollout.max_concurrency": WAVES * concurrency // (1 if self.is_small else 4),
            "vllm.engine": self.arguments.engine or ("embedded" if self.is_small else "vllm"),
            "vllm.max_num_seqs": concurrency,
        }
        if not self.is_small:
            own |= {"vllm.kv_cache_space_gib": 24, "vllm.compile": False, "vllm.gpu_memory_utilization": 0.3}
        self.config = config = resolve([], tuple(flags(self.common(world.model) | own)))
        known = preflight(config)
        self.prompts = [known.prompts[index] for index in range(WAVES * concurrency // self.group_size)]
        firsts = [known.renderer.layout(prompt.messages, {}).gaps[0].token_ids.tolist() for prompt in self.prompts]
        calls = [(ids, self.n_sampled) for ids in firsts for _ in range(self.group_size)]
        self.bare = BareEngine(config, calls, work=self.work / "bare", log=self.parts.logs / "halves-bare.log")
        facts |= {"num_calls": len(calls), "prompt_tokens": sum(map(len, firsts)) / len(firsts)}

    def _world(self) -> World:
        from dataclasses import replace

        if self.is_small:
            return make_world(self.work, is_rehearsal=True)
        world = make_world(self.work, is_rehearsal=False, tokenizer=self.arguments.tokenizer)
        model = self.make_model()
        for file in world.model.iterdir():
            if not file.name.startswith(("model", "config", "pytorch")):
                shutil.copy(file, model / file.name)
        return replace(world, model=model)

    async def start(self, facts: dict[str, Any], stack: AsyncExitStack) -> None:
        """vLLM alone in a process of its own; log, engine and workers; one filling of the engine to warm up, as the other side does."""
        from molt.driver.house import ray_session
        from molt.log.actor import RaySink, start_log_actor, stop_log_actor
        from molt.rollout.pool import RolloutPool

        self.bare.launch()
        stack.enter_context(ray_session(self.config))
        log = start_log_actor(self.work / f"rollouts-{time.strftime('%H%M%S')}", run="rollouts", attempt=1, store=self.config.log.store)
        stack.callback(stop_log_actor, log)
        self.rollouts = RolloutPool(self.config, sink=RaySink(log))
        stack.push_async_callback(self.rollouts.stop)
        await self.rollouts.start()
        began = time.monotonic()
        await self._roll_out(len(self.prompts) // WAVES, "warm")
        facts["warm_s"] = round(time.monotonic() - began, 2)

    def alone(self, facts: dict[str, Any]) -> None:
        """All calls at once."""
        facts |= self.bare.measure(limit_s=max(20.0, self.parts.left_s - CLOSE_S))

    async def pool(self, facts: dict[str, Any], name: str) -> None:
        """The same calls through workers, agent and log."""
        began = time.monotonic()
        n_sampled = await self._roll_out(len(self.prompts), name)
        facts |= {"tokens_per_s": n_sampled / (time.monotonic() - began), "n_sampled": n_sampled}

    async def _roll_out(self, num_groups: int, name: str) -> int:
        """Groups at once; tokens sampled when all are in the log."""
        from molt.rollout.tasks import GroupTask

        size = self.group_size
        tasks = [
            GroupTask(group_id=f"{name}-p{index}", epoch=0, order_index=index, prompt=prompt, group_size=size, members=tuple(range(size)))
            for index, prompt in enumerate(self.prompts[:num_groups])
        ]
        await self.rollouts.dispatch(*tasks)
        groups = [group async for group in self.rollouts.results(max(20.0, self.parts.left_s))]
        if failed := [item.error for group in groups for item in group.failed]:
            raise RuntimeError(f"{len(failed)} rollouts failed, the first with {failed[0]}")
        return sum(done.n_sampled for group in groups for done in group.done)

    def ratios(self, facts: dict[str, Any]) -> None:
        """What was to be shown: of each turn, and of all tokens over all time."""
        speeds = {name: made["tokens_per_s"] for name, made in self.parts.facts.items() if "tokens_per_s" in made}
        turns = [(speeds.get(f"pool_{turn}"), speeds.get(f"alone_{turn}")) for turn in range(MOST_TURNS)]
        pairs = [(pool, alone) for pool, alone in turns if pool and alone]
        if not pairs:
            raise RuntimeError("no turn had the time to measure both sides: give more with --limit-s")
        pool, alone = (statistics.harmonic_mean(side) for side in zip(*pairs, strict=True))
        facts |= {"by_turns": [one / other for one, other in pairs], "rollouts_to_alone": pool / alone}


if __name__ == "__main__":
    raise SystemExit(main())
