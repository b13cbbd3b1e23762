"""One mixture of experts in several layouts of trainer ranks, routes replayed, engines beside it: parity, speed, memory, refits, the log.

python -m tools.device.layouts --limit-s 540 [--gpus 2|4|8] [--only ep2 tp2] [--rehearse]

2 GPUs   a run with experts over both cards (ep2) and an engine on one of them; then its recorded steps by one rank, tp2, cp2, dp2
         with sharded weights and gradients, and with such that are held whole through a step
4 GPUs   runs of 20 steps with ep2, tp2 and cp2 on two cards, an engine of two on the others; then recorded steps again, by one rank too
8 GPUs   the same with ep4, ep2 x cp2 and tp2 x cp2 on four cards, two engines of two on the others

A recorded step is trained again from the log by another layout: same rows and routes, so the same loss, gradient norm and entropy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.device.models import make_moe_model
from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.readings import events_of, gaps, interval, steps_of
from tools.device.world import World, make_world

HELD: dict[str, Any] = {"reshard_after_forward": False, "defer_grad_sync": True}
"""Weights gathered, and gradients summed, once a step."""
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ep2": {"ep_size": 2},
        "tp2": {"tp_size": 2},
        "cp2": {"cp_size": 2},
        "cp2 held": {"cp_size": 2} | HELD,
        "dp2": {},
        "dp2 held": HELD,
    },
    4: {"ep4": {"ep_size": 4}, "ep2 x cp2": {"ep_size": 2, "cp_size": 2}, "tp2 x cp2": {"tp_size": 2, "cp_size": 2}},
}
"""By trainer ranks."""
SIZES: dict[int, dict[str, int]] = {
    0: {"hidden_size": 512, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_size": 64},
    2: {"hidden_size": 1024, "num_layers": 8, "num_experts": 64, "top_k": 8, "expert_size": 768},
    4: {"hidden_size": 2048, "num_layers": 12, "num_experts": 64, "top_k": 8, "expert_size": 768},
    8: {"hidden_size": 2048, "num_layers": 20, "num_experts": 64, "top_k": 8, "expert_size": 768},
}
"""By GPUs; 0 is a rehearsal. The largest has 6.3 billion parameters."""
TOLERANCE = {
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "entropy": 1e-5},
    "bfloat16": {"loss": 5e-3, "grad_norm": 5e-2, "entropy": 1e-2},
}
"""A layout against one rank: the loss, and gradient norm and entropy as shares. Kernels and the order of sums differ; in bf16 that shows.
The loss alone says little: strictly on-policy, it is about the mean advantage, which is zero."""
NUM_AGAIN = 4
"""Recorded steps that other layouts train."""
AGAIN_S = 45
"""What ranks take to start in another layout and to train the recorded steps, with some to spare."""
SKIPPED = 2
"""Steps at the start of a run that warm up and do not count."""


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=int, choices=[2, 4, 8], default=None, help="as many as there are, when absent")
    made.add_argument("--only", nargs="+", default=None, help="layouts, by name: a cold start and 20 steps may take a command of their own")
    made.add_argument("--steps", type=int, default=None, help="of each run; 20, or 8 on two GPUs, when absent")
    layouts = Layouts(made.parse_args())
    parts = layouts.parts
    if parts.run("world", layouts.make_world):
        recorded = layouts.record()
        if layouts.plans:
            for name in ("alone", *layouts.layouts):
                if name != recorded:
                    parts.run(f"again: {name}", lambda facts, name=name: asyncio.run(layouts.again(name, facts)), needs_s=35)
            parts.run("parity of layouts", layouts.compare)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Layouts:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_small: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.engine = arguments.engine or ("embedded" if self.is_small else "vllm")
        self.num_gpus: int = arguments.gpus or _num_gpus() or 2
        self.is_apart = self.num_gpus > 2
        self.num_ranks = self.num_gpus // 2 if self.is_apart else 2
        known = LAYOUTS[self.num_ranks]
        self.layouts = {name: known[name] for name in arguments.only or known}
        self.num_steps: int = arguments.steps or (4 if self.is_small else 20 if self.is_apart else 8)
        self.parts = Parts("layouts", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.stamp = time.strftime("%H%M%S")
        self.world: World | None = None
        self.model = Path()
        self.recorded = Path()
        """Folder of the log whose steps are trained again."""
        self.config: Any = None
        self.plans: list[Any] = []

    def make_world(self, facts: dict[str, Any]) -> None:
        """Prompts, and a random mixture with the tokenizer of a small model."""
        self.world = make_world(self.work, is_rehearsal=self.is_small, tokenizer=self.arguments.tokenizer)
        sizes, folder = SIZES[self._size], self.work / f"layouts-moe-{self._size}"
        self.model = make_moe_model(folder, tokenizer=self.world.model, dtype="float32" if self.is_small else "bfloat16", **sizes)
        size = sum(file.stat().st_size for file in self.model.glob("*.safetensors"))
        facts |= {"model": str(self.model), **sizes, "parameters": size // (4 if self.is_small else 2), "gpus": self.num_gpus}

    @property
    def _size(self) -> int:
        return 0 if self.is_small else self.num_gpus

    def record(self) -> str | None:
        """Runs that roll out and train: one on two GPUs, one for each layout on more. The name of the first that went well."""
        from molt.cli.programs import load_program
        from molt.log.reader import LogReader

        first = None
        for name in self.layouts:
            needs_s = 30.0 if self.is_small else 100.0
            if (first is None or self.is_apart) and self.parts.run(
                f"run: {name}", lambda facts, name=name: self.train(name, facts), needs_s=needs_s
            ):
                first = first or name
        if first is not None:
            self.recorded = self.work / "runs" / self._run_name(first)
            record = load_program("replay").read_record(LogReader.open(self.recorded))
            self.config, self.plans = record["config"], [plan for plan, _ in record["plans"][:NUM_AGAIN]]
        return first

    def _run_name(self, layout: str) -> str:
        return f"layouts-{layout.replace(' ', '')}-{self.stamp}"

    def fsdp(self, layout: str) -> dict[str, Any]:
        """Settings of a layout. Experts over ranks are AutoModel's; a rehearsal has no AutoModel without CUDA and takes tp in its place."""
        own = {"num_ranks": 1} if layout == "alone" else {"num_ranks": self.num_ranks, **self.layouts[layout]}
        if self.is_small and "ep_size" in own:
            own["tp_size"] = own.pop("ep_size")
        return own

    def settings(self, layout: str) -> dict[str, Any]:
        """Settings of a run: strictly on-policy, so that the distance of engine and trainer is that of kernels and routers alone."""
        small, world = self.is_small, self.world
        assert world is not None, "the part `world` failed"
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "run.name": self._run_name(layout),
            **{f"fsdp.{name}": size for name, size in self.fsdp(layout).items()},
            "actor.model_name_or_path": self.model,
            "actor.dtype": "float32" if small else "bfloat16",
            "actor.implementation": "automodel" if "ep_size" in self.fsdp(layout) else "hf",
            "actor.learning_rate": 1e-5,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else 512,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": self.num_steps,
            "train.batch_size": 8 if small else 128,
            "train.micro_batch_tokens": 256 if small else 16384,
            "train.async_queue_size": 0,
            "train.routing_replay": True,
            "rollout.batch_size": 2 if small else 16,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 8 if small else 256,
            "rollout.max_concurrency": 256,
            "algo.advantage.estimator": "grpo",
            "ckpt.export": False,
            "vllm.engine": self.engine,
            "placement.trainer": "apart" if self.is_apart and not small else "colocated",
        }
        return own if small else own | self._engines()

    def _engines(self) -> dict[str, Any]:
        """Engines of two GPUs beside the trainer's, reached by broadcast; on two GPUs one engine in a corner of a card."""
        common: dict[str, Any] = {"vllm.enforce_eager": True, "vllm.max_num_seqs": 256}
        if self.is_apart:
            engines = {"vllm.num_engines": self.num_gpus // 4, "vllm.tensor_parallel_size": 2, "vllm.weight_transfer": "nccl"}
            return common | engines | {"vllm.kv_cache_space_gib": 24, "vllm.gpu_memory_utilization": 0.6}
        transfer = "ipc" if self.arguments.ipc else "file"
        return common | {"vllm.kv_cache_space_gib": 6, "vllm.gpu_memory_utilization": 0.15, "vllm.weight_transfer": transfer}

    def train(self, layout: str, facts: dict[str, Any]) -> None:
        """A run of its own."""
        child = Child(molt("train", *flags(self.settings(layout))), log=self.parts.logs / f"layouts-{layout.replace(' ', '')}.log")
        with _memory(facts):
            facts["exit_code"] = child.wait(self.parts.left_s - (20 if self.is_apart else AGAIN_S * len(self.layouts)))
        facts["wall_s"] = round(time.monotonic() - child.began, 1)
        run_dir = self.work / "runs" / self._run_name(layout)
        steps = steps_of(run_dir)
        if facts["exit_code"] != 0 or not steps:
            raise RuntimeError(f"molt train left with {facts['exit_code']} after {len(steps)} steps: {child.tail()}")
        counted = steps[SKIPPED:] or steps
        tokens = _tokens_by_step(run_dir)
        whole_s = sum(step["train_s"] + step["wait_s"] for step in counted)
        refits = events_of(run_dir, "weights_refit")[1:]
        rates = [body["size_bytes"] / body["transfer_s"] / 1e9 for body in refits if body["transfer_s"]]
        facts |= {
            "num_steps": len(steps),
            "train_s": interval([step["train_s"] for step in counted])["mean"],
            "tokens_per_gpu_s": sum(tokens[step["step"]] for step in counted) / sum(step["train_s"] for step in counted) / self.num_ranks,
            "log_share": sum(step["log_s"] for step in counted) / whole_s,
            "refit_gb_s": interval(rates) if rates else None,
            "refit_gib": refits[0]["size_bytes"] / 2**30 if refits else None,
            "k3_by_step": [step["kl_mean"] for step in steps],
            "routing": [json.loads(body["metrics"]).get("replayed_share") for body in events_of(run_dir, "step_trained")],
            **_peaks(json.loads(events_of(run_dir, "step_trained")[-1]["metrics"])),
            **gaps(run_dir),
        }

    async def again(self, layout: str, facts: dict[str, Any]) -> None:
        """The first recorded steps in this layout, on a copy of the log."""
        from molt.admission.plan import plan_step
        from molt.config import Config
        from molt.driver.house import ray_session
        from molt.learn.ranks import RankGroup
        from molt.log.actor import start_log_actor, stop_log_actor

        copy = self.work / "copies" / f"{self.recorded.name}-{layout.replace(' ', '')}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.recorded / "log", copy / "log")
        flat = self.config.model_dump()
        fsdp = self.fsdp(layout)
        flat["fsdp"] |= {"tp_size": 1, "cp_size": 1, "ep_size": 1, "reshard_after_forward": True, "defer_grad_sync": False} | fsdp
        flat["actor"]["implementation"] = "automodel" if "ep_size" in fsdp else "hf"
        flat["vllm"]["weight_transfer"] = "file"
        config = Config.model_validate(flat)
        found, peaks = [], {}
        with ray_session(config), _memory(facts):
            log = start_log_actor(copy, run=self.recorded.name, attempt=8, store=config.log.store)
            ranks = await RankGroup.start(config, run_dir=copy, run=self.recorded.name, attempt=8, log=log, num_steps=self.num_steps)
            try:
                for old in self.plans:
                    plan = plan_step(
                        list(old.segments),
                        step=old.step,
                        policy_version=old.policy_version,
                        seed=old.seed,
                        num_ranks=config.fsdp.num_shards,
                        micro_batch_tokens=config.train.micro_batch_tokens,
                        cursor=old.cursor,
                    )
                    result = await ranks.train(plan)
                    if result.refused is not None:
                        raise RuntimeError(f"step {old.step} was refused: {result.refused.error}")
                    num_tokens = sum(row.n_tokens for row in plan.segments)
                    rate = num_tokens / result.train_s / config.fsdp.num_ranks
                    known = {"loss": result.loss, "grad_norm": result.grad_norm, "entropy": result.entropy_mean}
                    peaks = _peaks(result.metrics)
                    found.append({**known, "batch": result.batch_digest, "tokens_per_gpu_s": rate})
            finally:
                await ranks.stop()
                stop_log_actor(log)
        facts |= {"implementation": config.actor.implementation, "fsdp": fsdp, "steps": found, **peaks, "plan_gib": _plan_gib(config)}
        facts["tokens_per_gpu_s"] = max(step["tokens_per_gpu_s"] for step in found)

    def compare(self, facts: dict[str, Any]) -> None:
        """Each layout against one rank on the same rows: the recorded run, and those that trained its steps again."""
        tolerance = TOLERANCE["float32" if self.is_small else "bfloat16"]
        facts["tolerance"] = tolerance
        one = self.parts.facts["again: alone"]["steps"]
        sides = {name.removeprefix("again: "): known["steps"] for name, known in self.parts.facts.items() if "steps" in known}
        sides["recorded"] = [
            {"loss": body["loss"], "grad_norm": body["grad_norm"], "entropy": body["entropy_mean"], "batch": body["batch_digest"]}
            for body in events_of(self.recorded, "step_trained")[:NUM_AGAIN]
        ]
        wrong = []
        for name, steps in sides.items():
            apart = {
                "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(one, steps, strict=True)),
                **{key: max(abs(a[key] / b[key] - 1) for a, b in zip(one, steps, strict=True)) for key in ("grad_norm", "entropy")},
            }
            facts[name] = apart
            is_same = all(a["batch"] == b["batch"] for a, b in zip(one, steps, strict=True))
            wrong += [] if is_same and all(apart[key] <= tolerance[key] for key in tolerance) else [name]  # NaN is wrong
        if wrong:
            raise AssertionError(f"{', '.join(wrong)} differ from one rank: {facts}")


def _peaks(metrics: dict[str, float]) -> dict[str, float]:
    """Memory of the fullest rank by torch's own count, which a step tells on a GPU."""
    return {name: value for name, value in metrics.items() if name.startswith("max_memory_")}


def _plan_gib(config: Any) -> float:
    """What `molt plan` bills a trainer rank."""
    from molt.learn.meta import count_parameters
    from molt.memory import trainer_bill
    from molt.model_shape import ModelShape

    folder = config.actor.model_name_or_path
    return trainer_bill(config, ModelShape.read(folder), count_parameters(folder)).gib


def _tokens_by_step(run_dir: Path) -> dict[int, int]:
    """Tokens of the rows of each step, prompts included."""
    from molt.log.reader import LogReader

    cut = LogReader.open(run_dir).cut()
    used = cut.table("consumption", ["step", "segment_id"]).to_pylist()
    rows = cut.table("segments", ["segment_id", "spans"]).to_pylist()
    length = {row["segment_id"]: sum(span["len"] for span in row["spans"]) for row in rows}
    found: dict[int, int] = {}
    for row in used:
        found[row["step"]] = found.get(row["step"], 0) + length[row["segment_id"]]
    return found


@contextmanager
def _memory(facts: dict[str, Any]) -> Iterator[None]:
    """The most memory in use on each card meanwhile, GiB, looked at every second."""
    if not _num_gpus():
        yield
        return
    most: dict[int, float] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(1.0):
            command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
            listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
            for line in listed.splitlines():
                index, used = line.split(",")
                most[int(index)] = max(most.get(int(index), 0.0), round(float(used) / 1024, 2))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(5.0)
        facts["memory_gib"] = most


def _num_gpus() -> int:
    from molt.machine import gpus

    return len(gpus())


if __name__ == "__main__":
    raise SystemExit(main())
