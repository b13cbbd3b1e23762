"""What switches cost and give, as ratios on one card: optimizer offload, prefix cache, CUDA graphs, MTP, sleep.

python -m tools.device.trade_offs --limit-s 300 [--rehearse] [--engines graphs no_prefix]

Trainer modes are measured first, each alone in a process of its own. Then all engines are started side by side, which saves their
start, and are measured one after the other while the others wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tools.device.models import make_dense_model, make_mtp_model
from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.readings import refits_of, steps_of
from tools.device.world import World, make_world

PUBLISHED = {
    "offload": {"peak_gb_none": 64.7, "peak_gb_optimizer": 46.4, "train_time_ratio": 1.18},
    "prefix": {"warm_prefill_s": 0.05},
    "mtp": {"generation_s_off": 329, "generation_s_on": 64},
    "differs": "Molt's published figures are of a 35B mixture of experts on several H100s; ours are of a random dense model with "
    "Qwen3-0.6B's layers on one H200 (MTP: a random 12-layer model whose draft head is made to be right about 80 % of the time), so "
    "only the direction and the share of each effect can be compared.",
}
SMALL = {"hidden_size": 512, "num_layers": 8, "ffn_size": 1536}
"""Of the model of the run, so that its start takes no time."""
ENGINES = ("graphs", "eager", "no_prefix", "mtp", "no_mtp")
OFFLOADS = ("none", "optimizer", "full")


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES, help="engines to start")
    made.add_argument("--offload", choices=OFFLOADS, default=None, help="measure one mode in this process and print JSON")
    arguments = made.parse_args()
    if arguments.offload is not None:
        print("\n" + json.dumps(measure_offload(Path(arguments.work), arguments.offload, is_small=arguments.rehearse)))
        return 0
    trade = TradeOffs(arguments)
    parts = trade.parts
    if parts.run("world", trade.make_world):
        for mode in OFFLOADS:
            parts.run(f"offload_{mode}", lambda facts, mode=mode: trade.offload(facts, mode), needs_s=30)
        if arguments.engines:
            with asyncio.Runner() as runner:
                parts.run("engines", lambda facts: runner.run(trade.start(facts)), needs_s=60)
                for name, body in trade.engine_parts().items():
                    parts.run(name, lambda facts, body=body: runner.run(body(facts)), needs_s=10)
                parts.run("end", lambda facts: runner.run(trade.stop(facts)))
        parts.run("ratios", trade.ratios)
        parts.run("sleep_run", trade.sleep_run, needs_s=70)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class TradeOffs:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_small: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.engine = arguments.engine or ("embedded" if self.is_small else "vllm")
        self.parts = Parts("trade_offs", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.world: World | None = None
        self.models: dict[str, Path] = {}
        self.handles: dict[str, Any] = {}
        self.num_calls = 0

    def make_world(self, facts: dict[str, Any]) -> None:
        """The dense model, and the one with a draft head."""
        self.world = make_world(self.work, is_rehearsal=self.is_small)
        if self.is_small:
            self.models = {"dense": self.world.model, "mtp": self.world.model}
        else:
            tokenizer = self.world.model
            self.models = {"dense": make_dense_model(self.work / "dense", tokenizer=tokenizer)}
            self.models["mtp"] = make_mtp_model(self.work / "mtp", tokenizer=tokenizer)
        facts["models"] = {name: str(folder) for name, folder in self.models.items()}
        facts["published"] = PUBLISHED

    # Runs and the trainer

    def sleep_run(self, facts: dict[str, Any]) -> None:
        """A run whose engine sleeps at level 2 during every step, with answers in flight; engine and trainer must agree all along."""
        name = f"sleep-{time.strftime('%H%M%S')}"
        small, world, model = self.is_small, self.world, self.models["dense"]
        assert world is not None, "the part `world` failed"
        if not small:
            model = make_dense_model(self.work / "dense-small", **SMALL, tokenizer=world.model)
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "run.name": name,
            "actor.model_name_or_path": model,
            "actor.dtype": "float32" if small else "bfloat16",
            "actor.implementation": "hf",
            "actor.learning_rate": 1e-4,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else 512,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": 3 if small else 8,
            "train.batch_size": 8 if small else 64,
            "train.micro_batch_tokens": 512 if small else 16384,
            "train.partial_rollout_enable": True,
            "rollout.batch_size": 2 if small else 8,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 32 if small else 384,
            "rollout.max_concurrency": 256,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_mode": "trunc",
            "ckpt.export": False,
            "vllm.engine": self.engine,
            "placement.trainer": "colocated",
        }
        if not small:
            own |= {"vllm.enforce_eager": True, "vllm.kv_cache_space_gib": 16, "vllm.gpu_memory_utilization": 0.3}
            own |= {"vllm.sleep_level": 2, "vllm.weight_transfer": "ipc"}
        child = Child(molt("train", *flags(own)), log=self.parts.logs / "sleep-run.log")
        facts["exit_code"] = child.wait(self.parts.left_s - 20)
        run_dir = self.work / "runs" / name
        steps = steps_of(run_dir)
        facts |= {"num_steps": len(steps), "kl_by_step": [step["kl_mean"] for step in steps], "refits": refits_of(run_dir)[-3:]}
        facts["audit"] = Child(molt("audit", str(run_dir)), log=self.parts.logs / "sleep-audit.log").wait(60)
        if facts["exit_code"] != 0 or facts["audit"] != 0:
            raise RuntimeError(child.tail())

    def offload(self, facts: dict[str, Any], mode: str) -> None:
        """One mode in a process of its own."""
        command = [sys.executable, "-m", "tools.device.trade_offs", "--offload", mode, "--work", str(self.work)]
        child = Child([*command, *(["--rehearse"] if self.is_small else [])], log=self.parts.logs / f"offload-{mode}.log")
        if child.wait(min(90.0, self.parts.left_s - 5)) != 0:
            raise RuntimeError(child.tail())
        facts |= json.loads(child.log.read_text().strip().splitlines()[-1])

    # The engines

    def config(self, name: str) -> Any:
        """Settings of one engine."""
        from molt.settings import resolve

        is_mtp = name in ("mtp", "no_mtp")
        own: dict[str, Any] = {
            "actor.model_name_or_path": self.models["mtp" if is_mtp else "dense"],
            "actor.dtype": "float32" if self.is_small else "bfloat16",
            "data.max_len": 256 if self.is_small else 2048 if is_mtp else 9216,
            "train.micro_batch_tokens": 9216,
            "train.async_queue_size": 0,
            "vllm.engine": self.engine,
            "vllm.max_num_seqs": 64,
            "vllm.compile": False,
            "vllm.gpu_memory_utilization": 0.1,
            "vllm.kv_cache_space_gib": 1 if self.is_small else 4 if is_mtp else 14,
            "vllm.enforce_eager": name == "eager",
            "vllm.enable_prefix_caching": name != "no_prefix",
            "vllm.num_speculative_tokens": 3 if name == "mtp" and self.engine == "vllm" and not self.is_small else 0,
            "vllm.sleep_level": 2 if name == "no_prefix" and not self.is_small else 0,
            "placement.trainer": "colocated",
        }
        return resolve([], tuple(flags(own)))

    async def start(self, facts: dict[str, Any]) -> None:
        """Start all engines at once; one that does not start fails its own parts alone."""
        from dataclasses import replace

        import ray

        from molt.rollout.engine_actor import launch_engine
        from molt.rollout.spec import engine_specs

        ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
        share = 0.19 if ray.cluster_resources().get("GPU") else 0
        specs = {name: replace(engine_specs(self.config(name))[0], name=name, num_gpus=share) for name in self.arguments.engines}
        handles = {name: launch_engine(spec) for name, spec in specs.items()}

        async def started(name: str) -> float:
            began = time.perf_counter()
            await asyncio.wait_for(handles[name].start(), max(30.0, self.parts.left_s - 60))
            return time.perf_counter() - began

        for name, answer in zip(handles, await asyncio.gather(*map(started, handles), return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                facts[name] = f"{type(answer).__name__}: {answer}"[:1000]
            else:
                facts[name], self.handles[name] = round(answer, 1), handles[name]
        if len(self.handles) < len(handles):
            raise RuntimeError(f"engines that did not start: {sorted(set(handles) - set(self.handles))}")

    def engine_parts(self) -> dict[str, Any]:
        """The parts whose engines were asked for, in order."""
        needs = {
            "graphs": (self.graphs, {"graphs", "eager"}),
            "prefix": (self.prefix, {"graphs", "no_prefix"}),
            "mtp": (self.mtp, {"mtp", "no_mtp"}),
            "sleep": (self.sleep, {"no_prefix"}),
        }
        asked = set(self.arguments.engines)
        return {name: body for name, (body, own) in needs.items() if own <= asked and not (name == "sleep" and self.is_small)}

    async def graphs(self, facts: dict[str, Any]) -> None:
        """Tokens per second with CUDA graphs of decoding and without, by calls at once."""
        for name in ("graphs", "eager"):
            facts[name] = await self._speeds(name)

    async def mtp(self, facts: dict[str, Any]) -> None:
        """Tokens per second with three draft tokens and without, by calls at once."""
        for name in ("mtp", "no_mtp"):
            facts[name] = await self._speeds(name)

    async def _speeds(self, name: str) -> dict[str, float]:
        length = 16 if self.is_small else 128
        await self._calls(name, self._prompts(4, 32), length)
        found = {}
        for count in (1, 4) if self.is_small else (1, 16, 64):
            began = time.perf_counter()
            lengths = await self._calls(name, self._prompts(count, 32), length)
            found[str(count)] = round(sum(lengths) / (time.perf_counter() - began), 1)
        return found

    async def prefix(self, facts: dict[str, Any]) -> None:
        """Turns of conversations that grow, with the cache of prefixes and without; and one long prompt, cold and again."""
        first, added, reply, count, turns = (96, 8, 8, 2, 3) if self.is_small else (4096, 128, 32, 16, 6)
        for name in ("graphs", "no_prefix"):
            await self._calls(name, self._prompts(count, first, seed=50), 2)
            prompts, times, read = self._prompts(count, first), [], 0
            for turn in range(turns):
                began = time.perf_counter()
                answers = await self._answers(name, prompts, reply)
                times.append(round(time.perf_counter() - began, 4))
                read += sum(map(len, prompts))
                added_ids = self._prompts(count, added, seed=turn + 1)
                prompts = [[*prompt, *answer, *more] for prompt, answer, more in zip(prompts, answers, added_ids, strict=True)]
            facts[name] = {"turn_s": times, "later_turns_s": sum(times[1:]), "prompt_tokens": read}
            long = self._prompts(1, 200 if self.is_small else 8192, seed=99)
            for what in ("cold_prefill_s", "again_prefill_s"):
                began = time.perf_counter()
                await self._calls(name, long, 1)
                facts[name][what] = round(time.perf_counter() - began, 4)
        facts["known_before"] = 1 - (count * (first + (turns - 1) * (added + reply))) / facts["graphs"]["prompt_tokens"]
        facts["what"] = (
            f"{count} conversations, {first} ids at first, {reply} sampled and {added} added a turn; known_before: share of prompt ids"
        )

    async def sleep(self, facts: dict[str, Any]) -> None:
        """GiB freed and seconds of both levels, with a call in flight at level 1; the same greedy answer before and after."""
        import torch

        from molt.rollout.weights import read_tensors, weights_folder, write_weights

        handle, prompt = self.handles["no_prefix"], self._prompts(1, 64)[0]
        before = await self._greedy("no_prefix", prompt)
        tensors = dict(read_tensors(str(self.models["dense"])))
        source = write_weights(tensors, policy_version=1, folder=weights_folder("trade-offs"))
        for level in (1, 2):
            call = asyncio.create_task(self._calls("no_prefix", self._prompts(4, 32), 512)) if level == 1 else None
            await asyncio.sleep(0.3)
            free, _ = torch.cuda.mem_get_info()
            times = [time.perf_counter()]
            await handle.sleep(level)
            times.append(time.perf_counter())
            freed = torch.cuda.mem_get_info()[0] - free
            await handle.wake()
            times.append(time.perf_counter())
            if level == 2:
                await handle.refit(source)
                times.append(time.perf_counter())
            await handle.resume()
            times.append(time.perf_counter())
            facts[f"level_{level}"] = {
                "freed_gib": round(freed / 2**30, 2),
                "seconds": {
                    what: round(b - a, 3)
                    for what, a, b in zip(["sleep", "wake", *(["refit"] if level == 2 else []), "resume"], times, times[1:], strict=False)
                },
                "tokens_of_calls_in_flight": await call if call is not None else None,
                "is_same_answer": await self._greedy("no_prefix", prompt) == before,
            }
            self.parts.save()
        if not all(facts[f"level_{level}"]["is_same_answer"] for level in (1, 2)):
            raise AssertionError("an engine answers differently after its sleep")

    async def _greedy(self, name: str, prompt: list[int]) -> list[int]:
        from molt.rollout.engine import Sampling

        self.num_calls += 1
        sampling = Sampling(max_new_tokens=32, temperature=0.0)
        return list((await self.handles[name].generate(f"{name}-{self.num_calls}", prompt, sampling)).token_ids.tolist())

    async def _calls(self, name: str, prompts: list[list[int]], length: int) -> list[int]:
        return [len(ids) for ids in await self._answers(name, prompts, length)]

    async def _answers(self, name: str, prompts: list[list[int]], length: int) -> list[list[int]]:
        from molt.rollout.engine import Sampling

        if name not in self.handles:
            raise RuntimeError(f"engine {name} did not start")
        calls = []
        for prompt in prompts:
            self.num_calls += 1
            sampling = Sampling(max_new_tokens=length, temperature=1.0, seed=self.num_calls)
            calls.append(self.handles[name].generate(f"{name}-{self.num_calls}", prompt, sampling))
        return [generation.token_ids.tolist() for generation in await asyncio.wait_for(asyncio.gather(*calls), 90.0)]

    def _prompts(self, count: int, length: int, *, seed: int = 0) -> list[list[int]]:
        """Random ids that end no answer; other ones for every number of calls made."""
        numbers = np.random.default_rng([seed, self.num_calls])
        return numbers.integers(16, 200, (count, length)).tolist()

    async def stop(self, facts: dict[str, Any]) -> None:
        """End engines and Ray."""
        import ray

        for handle in self.handles.values():
            handle.kill()
        ray.shutdown()
        facts["is_ended"] = True

    def ratios(self, facts: dict[str, Any]) -> None:
        """Each switch as a ratio, beside what was published."""
        known = self.parts.facts
        plain = known["offload_none"]
        for mode in OFFLOADS[1:]:
            if "step_s" in known.get(f"offload_{mode}", {}) and "step_s" in plain:
                other = known[f"offload_{mode}"]
                facts[f"offload_{mode}"] = {key: other[key] / plain[key] for key in ("step_s", "peak_gib") if plain[key]}
        for part, on, off in (("graphs", "graphs", "eager"), ("mtp", "mtp", "no_mtp")):
            pair = known.get(part, {})
            if off in pair:
                facts[part] = {count: round(pair[on][count] / pair[off][count], 3) for count in pair[on]}
        pair = known.get("prefix", {})
        if "no_prefix" in pair:
            keys = ("later_turns_s", "again_prefill_s")
            facts["prefix"] = {key: round(pair["graphs"][key] / pair["no_prefix"][key], 3) for key in keys}
        facts["published"] = PUBLISHED


def measure_offload(work: Path, mode: str, *, is_small: bool) -> dict[str, Any]:
    """Peak memory and seconds of a step (two micro-batches and an update) of the policy with fsdp.offload=mode."""
    import torch

    from molt.learn.alone import alone
    from molt.learn.model import load_model
    from molt.learn.packing import pack
    from molt.learn.policy import Policy
    from molt.settings import resolve

    folder = work / ("tiny" if is_small else "dense")
    own = {"fsdp.offload": mode, "actor.dtype": "float32" if is_small else "bfloat16", "actor.implementation": "hf"}
    config = resolve([], tuple(flags({"actor.model_name_or_path": folder, **own})))
    rows, length = (2, 64) if is_small else (16, 1024)
    numbers = np.random.default_rng(0)
    mask = np.arange(length) >= length // 2
    with alone() as mesh:
        is_cuda = mesh.device_type == "cuda"
        policy = Policy(load_model(str(folder), config.actor, config.fsdp), config.actor, config.fsdp, mesh=mesh, num_steps=10)
        batches = [pack([numbers.integers(16, 200, length).astype(np.int32) for _ in range(rows)], [mask] * rows) for _ in range(2)]
        times = []
        for number in range(5):
            if number == 2 and is_cuda:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for batch in batches:
                logprobs, _ = policy(batch)
                (-logprobs.sum() / (2 * rows * length)).backward()
            policy.update()
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
        rest = torch.cuda.memory_allocated() / 2**30 if is_cuda else 0.0
    return {
        "mode": mode,
        "step_s": round(sum(times[2:]) / len(times[2:]), 4),
        "peak_gib": round(peak, 2),
        "between_steps_gib": round(rest, 2),
        "tokens_a_step": 2 * rows * length,
        "parameters": sum(parameter.numel() for parameter in policy.parameters),
    }


if __name__ == "__main__":
    raise SystemExit(main())
