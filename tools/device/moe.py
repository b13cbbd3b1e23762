"""A mixture of experts, without and with routing replay: distance of engine and trainer per token, over 20 steps, and routes kept.

python -m tools.device.moe --limit-s 280 [--rehearse] [--steps 20] [--only parity routes]

    at once: two training runs (without and with replay, same seeds), `molt parity` on the same tokens, routes under preemption
    then:    an fp8 engine of the same model, a dense model and its fp8 engine; last, what the logs of the two runs say
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tools.device.models import make_moe_model
from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.readings import events_of, gaps, refits_of, steps_of
from tools.device.world import World, make_world

RUNS = {"without": False, "with": True}
"""Training runs, and whether routes are replayed."""
CHILDREN = ("without", "with", "routes", "parity", "fp8", "dense")
SECOND = {"fp8": "routes", "dense": "parity"}
"""Started when the other has ended, so that not all engines start at once."""


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--only", nargs="+", default=CHILDREN, choices=CHILDREN)
    made.add_argument("--implementation", default="hf", choices=["hf", "automodel"])
    arguments = made.parse_args()
    if arguments.rehearse:
        arguments.only = [name for name in arguments.only if name != "fp8"]  # there is no fp8 engine on the CPU
    moe = Moe(arguments)
    parts, only = moe.parts, moe.arguments.only
    if parts.run("world", moe.make_world):
        parts.run("start", moe.start)
        for name in ("routes", "parity", "fp8", "dense"):
            if name in only:
                parts.run(name, lambda facts, name=name: moe.finish(name, facts))
        for name in RUNS:
            if name in only:
                parts.run(name, lambda facts, name=name: moe.read_run(name, facts))
        if all("gap" in parts.facts.get(name, {}) for name in RUNS):
            parts.run("ratio", moe.compare)
    for child in moe.children.values():
        child.end()
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Moe:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_small: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.engine = arguments.engine or ("embedded" if self.is_small else "vllm")
        self.parts = Parts("moe", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.stamp = time.strftime("%H%M%S")
        self.world: World | None = None
        self.model = Path()
        self.children: dict[str, Child] = {}

    def make_world(self, facts: dict[str, Any]) -> None:
        """The dense model with its tokenizer, and a random mixture with the same one."""
        self.world = make_world(self.work, is_rehearsal=self.is_small)
        sizes: dict[str, Any] = {"hidden_size": 1024, "num_layers": 6, "num_experts": 64, "top_k": 8, "expert_size": 384}
        if self.is_small:
            sizes = {"hidden_size": 128, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_size": 64}
        dtype = "float32" if self.is_small else "bfloat16"
        folder = self.work / ("moe-tiny" if self.is_small else "moe")
        self.model = make_moe_model(folder, tokenizer=self.world.model, dtype=dtype, **sizes)
        facts |= {"model": str(self.model), **sizes, "parameters": _num_parameters(self.model)}

    # What is started

    def start(self, facts: dict[str, Any]) -> None:
        """Everything that runs from the beginning."""
        for name in self.arguments.only:
            if name not in SECOND or SECOND[name] not in self.arguments.only:
                self._start(name)
        facts["started"] = list(self.children)

    def _start(self, name: str) -> None:
        commands = {"routes": self._routes, "parity": self._parity, "fp8": self._parity, "dense": self._parity}
        command = commands[name](name) if name in commands else molt("train", *flags(self.settings(name)))
        self.children[name] = Child(command, log=self.parts.logs / f"moe-{name}.log")

    def common(self, model: Path) -> dict[str, Any]:
        """Settings of every engine here."""
        own: dict[str, Any] = {
            "actor.model_name_or_path": model,
            "actor.dtype": "float32" if self.is_small else "bfloat16",
            "actor.implementation": self.arguments.implementation,
            "train.async_queue_size": 0,
            "vllm.engine": self.engine,
            "placement.trainer": "colocated",
        }
        if not self.is_small:
            own |= {"vllm.kv_cache_space_gib": 4, "vllm.gpu_memory_utilization": 0.1, "vllm.max_num_seqs": 256}
        return own

    def settings(self, name: str) -> dict[str, Any]:
        """A strictly on-policy run, so that the distance is that of kernels and routers alone."""
        small, world = self.is_small, self.world
        assert world is not None, "the part `world` failed"
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "run.name": self._run_name(name),
            "actor.learning_rate": 1e-5,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else 384,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": 3 if small else self.arguments.steps,
            "train.batch_size": 8 if small else 64,
            "train.micro_batch_tokens": 512 if small else 16384,
            "train.weights_digest_interval": 0,
            "train.routing_replay": RUNS[name],
            "rollout.batch_size": 2 if small else 8,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 8 if small else 160,
            "rollout.max_concurrency": 128,
            "algo.advantage.estimator": "grpo",
            "ckpt.export": False,
        }
        if not small:
            own |= {"vllm.compile": False, "vllm.weight_transfer": "ipc" if self.arguments.ipc else "file"}
        return self.common(self.model) | own

    def _run_name(self, name: str) -> str:
        return f"moe-{name}-{self.stamp}"

    def _parity(self, name: str) -> list[str]:
        """`molt parity`: the mixture on more than 1e5 tokens, its fp8 engine, or a dense model with its fp8 engine."""
        small = self.is_small
        assert self.world is not None, "the part `world` failed"
        own: dict[str, Any] = {
            "data.max_len": 160 if small else 512,
            "rollout.max_new_tokens": 16 if small else 256,
            "rollout.max_concurrency": 1024,
            "train.micro_batch_tokens": 1024 if small else 16384,
        }
        if not small:
            own["vllm.enforce_eager"] = True
        variants = {"parity": ["moe", "moe+r3"], "fp8": ["fp8"], "dense": ["dense"] if small else ["dense", "fp8"]}[name]
        num_samples = 1 if small else 28 if name == "parity" else 8
        model = self.world.model if name == "dense" else self.model
        words = ["--variants", *variants, "--samples", str(num_samples), "--json"]
        return molt("parity", *flags(self.common(model) | own), *words)

    def _routes(self, name: str) -> list[str]:
        """Routes under preemption and a cached prefix, in one engine whose cache holds a third of the calls."""
        from molt.settings import resolve

        small = self.is_small
        own: dict[str, Any] = {"vllm.engine": "vllm", "data.max_len": 128 if small else 768, "rollout.max_new_tokens": 64}
        own |= {"train.micro_batch_tokens": 4096, "train.routing_replay": True, "rollout.max_concurrency": 256}
        if small:
            own |= {"vllm.max_num_seqs": 16}
        else:
            own |= {"vllm.enforce_eager": True}
        config = resolve([], tuple(flags(self.common(self.model) | own)))
        sizes = {"prompt": 16, "answer": 72} if small else {"prompt": 96, "answer": 416}
        known: dict[str, Any] = {"config": config.model_dump_json(), "sizes": sizes}
        # 96 + 416 tokens are 32 blocks of 16: 640 blocks hold 20 of 64 calls. On the CPU 16 + 72 are 3 blocks of 32.
        known |= {"num_blocks": 8, "num_quiet": 2, "num_calls": 8} if small else {"num_blocks": 640, "num_quiet": 16, "num_calls": 64}
        file = self.work / f"{name}.json"
        file.write_text(json.dumps(known))
        return [sys.executable, "-m", "tools.device.routes", str(file)]

    # What is read

    def finish(self, name: str, facts: dict[str, Any]) -> None:
        """Wait for one child, start what follows it, keep what it says."""
        if name not in self.children:
            self._start(name)
        child = self.children[name]
        limit_s = 90.0 if self.parts.left_s > 120 else self.parts.left_s - 15
        facts["exit_code"] = child.wait(min(limit_s + (60 if name in ("routes", "parity", "dense") else 0), self.parts.left_s - 10))
        for later, earlier in SECOND.items():
            if earlier == name and later in self.arguments.only and later not in self.children:
                self._start(later)
        facts["wall_s"] = round(time.monotonic() - child.began, 1)
        found = _last_json(child.log.read_text(errors="replace"))
        if found is None or "error" in found:
            raise RuntimeError(f"{name} left with {facts['exit_code']}: {child.tail()}")
        facts |= found
        if name == "routes" and not found["preempted"]["num_preemptions"]:
            raise AssertionError("vLLM preempted nothing; the cache is too large for this part")

    def read_run(self, name: str, facts: dict[str, Any]) -> None:
        """What the log of a training run says."""
        child = self.children[name]
        reserve_s = 10 if self.is_small else 85 if name == "without" else 45  # an interrupted run drains, and its log is read
        facts["exit_code"] = child.wait(self.parts.left_s - reserve_s)
        facts["wall_s"] = round(time.monotonic() - child.began, 1)
        run_dir = self.work / "runs" / self._run_name(name)
        steps = steps_of(run_dir)
        if not steps:
            raise RuntimeError(child.tail())
        facts |= {
            "num_steps": len(steps),
            "k3_by_step": [step["kl_mean"] for step in steps],
            "reward_by_step": [step["reward_mean"] for step in steps],
            **gaps(run_dir),
            "train_s": float(np.mean([step["train_s"] for step in steps[1:] or steps])),
            "refits": refits_of(run_dir)[-2:],
            "routing": [_routing(body["metrics"]) for body in events_of(run_dir, "step_trained")],
        }

    def compare(self, facts: dict[str, Any]) -> None:
        """What replay changes."""
        without, replayed = self.parts.facts["without"], self.parts.facts["with"]
        facts["gap_ratio"] = replayed["gap"]["mean"] / without["gap"]["mean"]
        facts["k3_without"] = float(np.mean(without["k3_by_step"]))
        facts["k3_with"] = float(np.mean(replayed["k3_by_step"]))
        facts["k3_ratio"] = facts["k3_with"] / facts["k3_without"]
        facts["num_tokens"] = [without["gap"]["num_tokens"], replayed["gap"]["num_tokens"]]


ROUTING = ("replayed_share", "expert_agreement_mean", "expert_agreement_min")


def _routing(metrics: str | dict[str, Any]) -> dict[str, float | None]:
    told = json.loads(metrics) if isinstance(metrics, str) else metrics
    return {key: told.get(key) for key in ROUTING}


def _last_json(text: str) -> dict[str, Any] | None:
    """The JSON object that a program printed last, on one line or on several."""
    lines = text.splitlines()
    for first in range(len(lines) - 1, -1, -1):
        if lines[first].startswith("{"):
            last = next(
                (
                    number
                    for number in range(first, len(lines))
                    if lines[number].rstrip().endswith("}") and (number == first or lines[number].startswith("}"))
                ),
                None,
            )
            if last is not None:
                try:
                    return dict(json.loads("\n".join(lines[first : last + 1])))
                except json.JSONDecodeError:
                    continue
    return None


def _num_parameters(folder: Path) -> int:
    from molt.rollout.weights import tensor_shapes

    return int(sum(np.prod(shape) for shape in tensor_shapes(str(folder)).values()))


if __name__ == "__main__":
    raise SystemExit(main())
