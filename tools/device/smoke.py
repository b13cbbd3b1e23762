"""Does everything work on this card: environment, Ray seats, contract of the engine, refits by file and by handles, a run, audit, replay.

python -m tools.device.smoke --limit-s 480 [--rehearse]
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.world import World, make_world

PACKAGES = (
    "torch",
    "vllm",
    "ray",
    "transformers",
    "pyarrow",
    "pylance",
    "duckdb",
    "numpy",
    "safetensors",
    "orjson",
    "cyclopts",
    "nemo-automodel",
)


def main() -> int:
    """All parts; 0 when none failed."""
    arguments = parser(__doc__).parse_args()
    smoke = Smoke(arguments)
    parts = smoke.parts
    parts.run("environment", smoke.environment)
    parts.run("world", smoke.make_world)
    if smoke.world is not None:
        parts.run("ray", smoke.ray)
        parts.run("engine", lambda facts: asyncio.run(smoke.engine(facts)), needs_s=60)
        if smoke.is_cuda:
            parts.run("ipc", lambda facts: asyncio.run(smoke.ipc(facts)), needs_s=60)
        parts.run("ray_end", smoke.ray_end)
        parts.run("train", smoke.train, needs_s=60)
        parts.run("audit", smoke.audit)
        parts.run("replay", smoke.replay, needs_s=30)
        if smoke.is_cuda:
            parts.run("automodel", smoke.automodel, needs_s=90)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Smoke:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: Any) -> None:
        self.is_rehearsal: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.parts = Parts("smoke", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.world: World | None = None
        self.run_dir: Path | None = None
        self.is_cuda = False
        self.engine_kind = arguments.engine or ("embedded" if self.is_rehearsal else "vllm")

    @property
    def the_world(self) -> World:
        """The model and its task."""
        assert self.world is not None, "the part `world` failed"
        return self.world

    def environment(self, facts: dict[str, Any]) -> None:
        """Versions, card, memory."""
        import torch

        self.is_cuda = torch.cuda.is_available()
        facts["python"] = platform.python_version()
        facts["packages"] = {name: _version(name) for name in PACKAGES}
        facts["cuda"] = {"available": self.is_cuda, "torch_cuda": torch.version.cuda, "num_gpus": torch.cuda.device_count()}
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
            facts["cards"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip().splitlines()
        facts["shared_memory_gib"] = round(shutil.disk_usage("/dev/shm").total / 2**30, 2)
        facts["disk_free_gib"] = round(shutil.disk_usage("/").free / 2**30, 1)
        import molt.cli  # noqa: F401

    def make_world(self, facts: dict[str, Any]) -> None:
        """Model, tokenizer, prompts."""
        self.world = make_world(self.work, is_rehearsal=self.is_rehearsal)
        facts["model"] = str(self.world.model)

    def ray(self, facts: dict[str, Any]) -> None:
        """Ray starts, an actor with a share of a GPU and variables of its own sees both."""
        import ray

        ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
        facts["resources"] = {name: value for name, value in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        share = 0.5 if facts["resources"].get("GPU") else 0

        def look() -> dict[str, str | None]:
            import os

            return {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "MOLT_TRACEBACK", "PYTHONPATH")}

        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": share, "runtime_env": {"env_vars": {"MOLT_TRACEBACK": "1"}}}
        facts["worker_sees"] = ray.get(ray.remote(look).options(**options).remote(), timeout=60)

    def ray_end(self, facts: dict[str, Any]) -> None:
        """The session of the engine parts ends."""
        import ray

        ray.shutdown()
        facts["is_ended"] = True

    def config(self, **flat: Any) -> Any:
        """Settings of this program's runs."""
        from molt.settings import resolve

        world = self.the_world
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "actor.model_name_or_path": world.model,
            "actor.dtype": "float32" if self.is_rehearsal else "bfloat16",
            "actor.implementation": "hf",
            "data.prompt_dataset": world.prompts,
            "data.max_len": world.max_len,
            "train.agent_path": world.agent,
            "rollout.max_new_tokens": world.max_new_tokens,
            "vllm.engine": self.engine_kind,
            "placement.trainer": "colocated",
        }
        if self.engine_kind == "vllm" and not self.is_rehearsal:
            own |= {"vllm.kv_cache_space_gib": 4, "vllm.compile": False, "vllm.gpu_memory_utilization": 0.2}
        return resolve([], tuple(flags(own | flat)))

    async def engine(self, facts: dict[str, Any]) -> None:
        """Start through the actor; log-probs, refits by file in the middle of calls, versions, times."""
        from tools.device.baseline import baselines
        from tools.device.contract import Bench

        long = {} if self.is_rehearsal else {"data.max_len": 2048}
        bench = Bench(self.config(**long), device="cuda" if self.is_cuda else "cpu", num_calls=8 if self.is_rehearsal else 64)
        try:
            await bench.start(facts)
            await bench.logprobs(facts)
            tasks = sorted((Path.home() / "kit").glob("*.jsonl"))
            facts["baselines"] = {} if self.is_rehearsal else await baselines(bench.engine, bench.tokenizer, tasks)
            for name, found in facts["baselines"].items():
                print(f"  {name:28} {found['reward']:.3f}  {found['length']:5.1f} tokens  {found['shown'][:2]}", flush=True)
            self.parts.save()
            await bench.refits(facts, num_refits=3)
        finally:
            await bench.stop()

    async def ipc(self, facts: dict[str, Any]) -> None:
        """The same refits over CUDA handles."""
        from tools.device.contract import Bench

        bench = Bench(
            self.config(**{"vllm.weight_transfer": "ipc", "vllm.enforce_eager": True, "data.max_len": 2048}), device="cuda", num_calls=64
        )
        try:
            await bench.start(facts)
            await bench.refits(facts, num_refits=3)
        finally:
            await bench.stop()

    def settings(self) -> dict[str, Any]:
        """Settings of the short run."""
        small = self.is_rehearsal
        return {
            "run.dir": self.work / "runs",
            "run.name": f"smoke-{time.strftime('%H%M%S')}",
            "actor.model_name_or_path": self.the_world.model,
            "actor.dtype": "float32" if small else "bfloat16",
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-5,
            "data.prompt_dataset": self.the_world.prompts,
            "data.max_len": self.the_world.max_len,
            "train.agent_path": self.the_world.agent,
            "train.num_steps": 3 if small else 6,
            "train.batch_size": 8 if small else 128,
            "train.micro_batch_tokens": 512 if small else 16384,
            "train.deterministic": not small,
            "train.partial_rollout_enable": True,
            "rollout.batch_size": 2 if small else 16,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": self.the_world.max_new_tokens,
            "rollout.max_concurrency": 16 if small else 256,
            "rollout.num_workers": 1 if small else 2,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
            "vllm.engine": self.engine_kind,
            "placement.trainer": "colocated",
            **({} if small else {"vllm.kv_cache_space_gib": 4, "vllm.compile": False, "vllm.gpu_memory_utilization": 0.2}),
        }

    def train(self, facts: dict[str, Any]) -> None:
        """A few asynchronous steps with trainer and engine on one card."""
        settings = self.settings()
        child = Child(molt("train", *flags(settings)), log=self.parts.logs / "smoke-train.log")
        code = child.wait(self.parts.left_s - 45)
        facts |= {"exit_code": code, "wall_s": round(time.monotonic() - child.began, 1)}
        self.run_dir = Path(settings["run.dir"]) / settings["run.name"]
        from tools.device.readings import refits_of, steps_of

        steps = steps_of(self.run_dir)
        facts |= {"num_steps": len(steps), "last": steps[-1] if steps else None, "refits": refits_of(self.run_dir)[-2:]}
        if code != 0:
            raise RuntimeError(f"molt train ended with {code}: {child.tail()}")

    def automodel(self, facts: dict[str, Any]) -> None:
        """A few steps more with NeMo AutoModel in place of the Hugging Face class, and refits over CUDA handles."""
        from tools.device.readings import refits_of, steps_of

        own = {"actor.implementation": "automodel", "train.num_steps": 4, "vllm.weight_transfer": "ipc", "train.deterministic": False}
        settings = self.settings() | own
        settings["run.name"] += "-automodel"
        child = Child(molt("train", *flags(settings)), log=self.parts.logs / "smoke-automodel.log")
        facts["exit_code"] = child.wait(self.parts.left_s - 10)
        run_dir = Path(settings["run.dir"]) / settings["run.name"]
        facts |= {"steps": steps_of(run_dir)[-2:], "refits": refits_of(run_dir)[-2:]}
        if facts["exit_code"] != 0:
            raise RuntimeError(f"molt train ended with {facts['exit_code']}: {child.tail()}")

    def audit(self, facts: dict[str, Any]) -> None:
        """Every invariant of the run."""
        assert self.run_dir is not None, "no run"
        child = Child(molt("audit", str(self.run_dir)), log=self.parts.logs / "smoke-audit.log")
        facts["exit_code"] = child.wait(60)
        if facts["exit_code"] != 0:
            raise RuntimeError(child.tail())

    def replay(self, facts: dict[str, Any]) -> None:
        """Three steps again, bit by bit."""
        assert self.run_dir is not None, "no run"
        child = Child(molt("replay", str(self.run_dir), "--steps", "3", "--json"), log=self.parts.logs / "smoke-replay.log")
        facts["exit_code"] = child.wait(min(120.0, self.parts.left_s - 5))
        facts["says"] = child.tail(400)
        if facts["exit_code"] != 0:
            raise RuntimeError(child.tail())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    assert Path.cwd() == ROOT or str(ROOT) in sys.path, "run it as a module from the repository"
    raise SystemExit(main())
