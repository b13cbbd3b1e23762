"""What the loop costs beside its parts: rollouts beside vLLM alone, steps beside a bare FSDP2 loop, async beside sync, the log's share.

python -m tools.device.overlap --limit-s 400 [--rehearse]
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

from tools.device.bare import bare_engine, bare_steps
from tools.device.parts import Child, Parts, flags, molt, parser
from tools.device.readings import interval, refits_of, steps_of
from tools.device.world import World, make_world

SKIPPED = 3
"""Steps at the start that warm up and do not count."""


def main() -> int:
    """All parts; 0 when none failed."""
    arguments = parser(__doc__).parse_args()
    overlap = Overlap(arguments)
    parts = overlap.parts
    parts.run("world", overlap.make_world)
    if overlap.world is not None:
        parts.run("async", lambda facts: overlap.train(facts, lag=2), needs_s=60)
        parts.run("sync", lambda facts: overlap.train(facts, lag=0), needs_s=60)
        parts.run("steps", lambda facts: asyncio.run(overlap.steps(facts)), needs_s=40)
        parts.run("rollouts", overlap.rollouts, needs_s=60)
        parts.run("ratios", overlap.ratios)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Overlap:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: Any) -> None:
        self.is_rehearsal: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.engine = arguments.engine or ("embedded" if self.is_rehearsal else "vllm")
        self.parts = Parts("overlap", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.world: World | None = None
        self.run_dir: Path | None = None

    def make_world(self, facts: dict[str, Any]) -> None:
        """Model and prompts."""
        self.world = make_world(self.work, is_rehearsal=self.is_rehearsal)
        facts["model"] = str(self.world.model)

    def settings(self, **own: Any) -> dict[str, Any]:
        """Settings of the runs: answers of full length, so that both sides do the same work."""
        small, world = self.is_rehearsal, self.world
        assert world is not None, "the part `world` failed"
        common: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "actor.model_name_or_path": world.model,
            "actor.dtype": "float32" if small else "bfloat16",
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-6,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else 512,
            "train.agent_path": world.agent,
            "train.num_steps": 5 if small else 16,
            "train.batch_size": 8 if small else 256,
            "train.micro_batch_tokens": 512 if small else 32768,
            "train.weights_digest_interval": 10,
            "rollout.batch_size": 2 if small else 32,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 8 if small else 256,
            "rollout.num_workers": 1 if small else 4,
            "rollout.max_concurrency": 32 if small else 192,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
            "ckpt.export": False,
            "vllm.engine": self.engine,
            "placement.trainer": "colocated",
        }
        if not small:
            common |= {"vllm.kv_cache_space_gib": 16, "vllm.compile": False, "vllm.gpu_memory_utilization": 0.3, "vllm.max_num_seqs": 512}
        return common | own

    def train(self, facts: dict[str, Any], *, lag: int) -> None:
        """A run of its own; seconds of a step from one step's end to the next."""
        name = f"overlap-lag{lag}-{time.strftime('%H%M%S')}"
        settings = self.settings(**{"run.name": name, "train.async_queue_size": lag})
        child = Child(molt("train", *flags(settings)), log=self.parts.logs / f"overlap-lag{lag}.log")
        facts["exit_code"] = child.wait(self.parts.left_s - 20)
        run_dir = self.work / "runs" / name
        steps, refits = steps_of(run_dir)[SKIPPED:], refits_of(run_dir)[SKIPPED:]
        if not steps:
            raise RuntimeError(child.tail())
        if lag:
            self.run_dir = run_dir
        whole = [step["train_s"] + step["wait_s"] for step in steps]
        pauses = [sum(refit[key] for key in ("pause_s", "transfer_s", "verify_s", "resume_s")) for refit in refits]
        facts |= {
            "num_steps": len(steps),
            "step_s": interval(whole)["mean"],
            "train_s": interval([step["train_s"] for step in steps])["mean"],
            "wait_s": interval([step["wait_s"] for step in steps])["mean"],
            "log_s": interval([step["log_s"] for step in steps])["mean"],
            "log_share": sum(step["log_s"] for step in steps) / sum(whole),
            "refit_s": interval(pauses)["mean"] if pauses else None,
            "sampled_per_s": sum(step["n_sampled"] for step in steps) / sum(whole),
        }

    async def steps(self, facts: dict[str, Any]) -> None:
        """The recorded plans again with nothing beside: ranks and log, then a bare loop on the same packed rows."""
        assert self.run_dir is not None, "the part `async` made no run"
        from molt.cli.programs import load_program
        from molt.driver.house import ray_session
        from molt.learn.ranks import RankGroup
        from molt.log.actor import start_log_actor, stop_log_actor
        from molt.log.reader import LogReader

        copy = self.work / "copies" / self.run_dir.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run_dir, copy)
        record = load_program("replay").read_record(LogReader.open(copy))
        config, plans = record["config"], [plan for plan, _ in record["plans"]]
        with ray_session(config):
            log = start_log_actor(copy, run=self.run_dir.name, attempt=9, store=config.log.store)
            ranks = await RankGroup.start(config, run_dir=copy, run=self.run_dir.name, attempt=9, log=log, num_steps=record["num_steps"])
            try:
                results = [await ranks.train(plan) for plan in plans]
            finally:
                await ranks.stop()
                stop_log_actor(log)
        n_tokens = [sum(row.n_tokens for row in plan.segments) for plan in plans]
        counted = slice(SKIPPED, None)
        seconds = sum(result.train_s for result in results[counted])
        facts["molt"] = {
            "tokens_per_s": sum(n_tokens[counted]) / seconds,
            "log_share": sum(result.log_s for result in results[counted]) / seconds,
        }
        facts["bare"] = await asyncio.to_thread(bare_steps, config, plans, LogReader.open(copy), SKIPPED)
        facts["ratio"] = facts["molt"]["tokens_per_s"] / facts["bare"]["tokens_per_s"]
        facts["molt"]["mfu"] = facts["bare"]["mfu"] * facts["ratio"]

    def rollouts(self, facts: dict[str, Any]) -> None:
        """Tokens per second through workers, agents and the log; then of vLLM alone on the same calls, in a process of its own."""
        from molt.driver.house import ray_session
        from molt.settings import resolve
        from tools.bench.loop import pool_tokens_per_s

        config = resolve([], tuple(flags(self.settings())))
        folder = self.work / "pool" / time.strftime("%H%M%S")
        with ray_session(config):
            facts["tokens_per_s"], calls = asyncio.run(pool_tokens_per_s(config, folder, 8 if self.is_rehearsal else 256))
        file = self.work / "calls.json"
        file.write_text(json.dumps({"config": config.model_dump_json(), "calls": [(prompt.tolist(), count) for prompt, count in calls]}))
        facts |= {"num_calls": len(calls), **bare_engine(file, self.parts.logs / "overlap-bare.log", limit_s=self.parts.left_s - 10)}
        facts["ratio"] = facts["tokens_per_s"] / facts["bare_tokens_per_s"]

    def ratios(self, facts: dict[str, Any]) -> None:
        """What was to be shown."""
        known = self.parts.facts
        facts["rollout_to_bare"] = known["rollouts"].get("ratio")
        facts["training_to_bare"] = known["steps"].get("ratio")
        facts["async_to_sync_step"] = known["async"]["step_s"] / known["sync"]["step_s"]
        facts["log_share"] = known["async"]["log_share"]


if __name__ == "__main__":
    raise SystemExit(main())
