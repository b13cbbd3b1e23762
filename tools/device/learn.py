"""Does SmolLM2 learn sums, asynchronously, through the log: runs at once on one card, rewards with intervals, shares of tokens kept.

python -m tools.device.learn --runs 0:1 1:1 2:1 0:0 0:4 0:4:d 0:8 0:8:d 0:1:d 0:1:bf16 --train-s 460 [--rehearse]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.device.parts import Child, Parts, flags, molt, parser
from tools.device.readings import geo_shares, interval, lag_of, refits_of, rewards_of, root_of, steps_of
from tools.device.world import World, make_world
from tools.plot_lag import AREAL

WINDOW = 10
"""Steps in the first and in the last window."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5th percentile of Student's t by number of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run."""

    name: str
    seed: int
    lag: int
    level: str
    mode: str
    band: tuple[str, str] | None
    is_decoupled: bool
    dtype: str


def main() -> int:
    """All runs at once; 0 when every one of them left steps."""
    arguments = _arguments()
    parts = Parts(arguments.name, arguments.out, work=arguments.work, limit_s=arguments.limit_s)
    held: dict[str, Any] = {}

    def prepare(facts: dict[str, Any]) -> None:
        held["world"] = make_world(arguments.work, is_rehearsal=arguments.rehearse, task=arguments.task)
        facts["model"], facts["prompts"] = held["world"].model.name, held["world"].prompts.name

    parts.run("world", prepare)
    if "world" in held:
        parts.run("runs", lambda facts: run_all(arguments, parts, held["world"], facts), needs_s=60)
        parts.run("table", lambda facts: compare(parts, facts))
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--name", default="learns")
    made.add_argument("--task", default="cs_d1", help="sums, or the name of a file of prompts in the kit")
    made.add_argument("--agent", type=Path, default=None, help="another agent than few_shot_sum_agent.py")
    made.add_argument("--temperature", type=float, default=1.0)
    made.add_argument(
        "--runs", nargs="+", default=["0:1"], metavar="SEED:LAG[:d|bf16]", help="d is decoupled correction, bf16 another dtype than --dtype"
    )
    made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of engine and trainer")
    made.add_argument("--workers", type=int, default=2, help="rollout workers of a run")
    made.add_argument("--decoupled", action="store_true", help="a second run of every lag above 0, with decoupled correction")
    made.add_argument("--only-decoupled", action="store_true", help="no run without it")
    made.add_argument("--level", default="token", choices=["token", "seq", "geo"])
    made.add_argument("--mode", default="trunc", choices=["mask", "clip", "trunc"])
    made.add_argument("--band", nargs=2, default=None, metavar=("LOW", "HIGH"))
    made.add_argument("--train-s", type=float, default=330.0, help="seconds from the start of the runs until they are asked to end")
    made.add_argument("--steps", type=int, default=400, help="most optimizer steps")
    made.add_argument("--learning-rate", type=float, default=1e-5)
    made.add_argument("--groups", type=int, default=16, help="prompts in a step")
    made.add_argument("--members", type=int, default=8, help="rollouts of a prompt")
    made.add_argument("--max-new-tokens", type=int, default=32)
    return made.parse_args()


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """The runs that were asked for."""
    return [
        Variant(
            name="-".join([arguments.name, f"seed{seed}", f"lag{lag}", *("decoupled" if kind == "d" else kind for kind in kinds)]),
            seed=int(seed),
            lag=int(lag),
            level=arguments.level,
            mode=arguments.mode,
            band=None if arguments.band is None else tuple(arguments.band),
            is_decoupled="d" in kinds,
            dtype="bfloat16" if "bf16" in kinds else arguments.dtype,
        )
        for seed, lag, *kinds in (run.split(":") for run in arguments.runs)
    ]


def settings(arguments: argparse.Namespace, world: World, variant: Variant) -> dict[str, Any]:
    """Settings of one run."""
    small = arguments.rehearse
    groups, members = (2, 4) if small else (arguments.groups, arguments.members)
    own: dict[str, Any] = {
        "run.dir": arguments.work / "runs",
        "run.name": variant.name,
        "run.seed": variant.seed,
        "actor.model_name_or_path": world.model,
        "actor.dtype": "float32" if small else variant.dtype,
        "actor.implementation": "hf",
        "actor.learning_rate": arguments.learning_rate,
        "data.prompt_dataset": world.prompts,
        "data.max_len": world.max_len,
        "train.agent_path": arguments.agent or world.agent,
        "train.num_steps": 3 if small else arguments.steps,
        "train.batch_size": groups * members,
        "train.micro_batch_tokens": 512 if small else 8192,
        "train.async_queue_size": variant.lag,
        "train.weights_digest_interval": 10,
        "rollout.batch_size": groups,
        "rollout.n_samples_per_prompt": members,
        "rollout.max_new_tokens": min(world.max_new_tokens, arguments.max_new_tokens),
        "rollout.temperature": arguments.temperature,
        "rollout.max_concurrency": 16 if small else 512,
        "rollout.num_workers": 1 if small else arguments.workers,
        "algo.advantage.estimator": "grpo",
        "algo.advantage.is_correction_level": variant.level,
        "algo.advantage.is_correction_mode": variant.mode,
        "ckpt.export": False,
        "vllm.engine": arguments.engine or ("embedded" if small else "vllm"),
        "placement.trainer": "colocated",
    }
    if variant.band is not None:
        own["algo.advantage.is_correction_threshold"] = f"[{', '.join(variant.band)}]"
    if variant.is_decoupled:
        own["algo.advantage.decoupled"] = True
    if not small:
        own |= {
            "vllm.kv_cache_space_gib": 4,
            "vllm.compile": False,
            "vllm.gpu_memory_utilization": 0.08,
            "vllm.max_num_seqs": 256,
            "vllm.weight_transfer": "ipc" if arguments.ipc else "file",
        }
    return own


def run_all(arguments: argparse.Namespace, parts: Parts, world: World, facts: dict[str, Any]) -> None:
    """Start all runs, wait, read their logs. What ended badly is noted; the others count."""
    began = time.monotonic()
    children = {}
    num_cards = cards()
    for number, variant in enumerate(variants(arguments)):
        command = molt("train", *flags(settings(arguments, world, variant)))
        env = {"CUDA_VISIBLE_DEVICES": str(number % num_cards)} if num_cards else {}
        children[variant] = Child(command, log=parts.logs / f"{variant.name}.log", env=env)
    limit_s = min(arguments.train_s, parts.left_s - 60)
    while time.monotonic() - began < limit_s and any(child.process.poll() is None for child in children.values()):
        time.sleep(1.0)
        for variant in children:
            progress = [step["reward_mean"] for step in steps_of(arguments.work / "runs" / variant.name)] if _is_due(began) else []
            if progress:
                print(f"  {time.monotonic() - began:5.0f} s  {variant.name}: {len(progress)} steps, reward {progress[-1]:.3f}", flush=True)
    for child in children.values():
        child.interrupt()
    for variant, child in children.items():
        code = child.wait(max(5.0, min(40.0, parts.left_s - 15)))
        facts[variant.name] = {"exit_code": code, "wall_s": round(time.monotonic() - child.began, 1)}
        try:
            facts[variant.name] |= read_run(arguments.work / "runs" / variant.name, variant)
        except Exception as error:
            facts[variant.name]["error"] = f"{type(error).__name__}: {error}; {child.tail(600)}"
        parts.save()
    if not any("steps" in found for found in facts.values()):
        raise RuntimeError("no run left a step")


def cards() -> int:
    """GPUs of this machine, over which the runs are dealt."""
    import torch

    return torch.cuda.device_count()


def _is_due(began: float) -> bool:
    return int(time.monotonic() - began) % 30 == 0


def read_run(run_dir: Path, variant: Variant) -> dict[str, Any]:
    """Figures of one run, from its log."""
    steps, rewards = steps_of(run_dir), rewards_of(run_dir)
    refits = refits_of(run_dir)
    if not steps:
        raise RuntimeError("it made no step")
    window = min(WINDOW, max(1, len(rewards) // 2))
    first = [value for step in rewards[:window] for value in step]
    last = [value for step in rewards[-window:] for value in step]
    return {
        "seed": variant.seed,
        "max_lag": variant.lag,
        "dtype": variant.dtype,
        "correction": f"{variant.level} {variant.mode}{' decoupled' if variant.is_decoupled else ''}",
        "band": variant.band,
        "num_steps": len(steps),
        "num_rollouts": sum(len(step) for step in rewards),
        "n_sampled": sum(step["n_sampled"] for step in steps),
        "reward_first": interval(first),
        "reward_last": interval(last),
        "effective_share": sum(step["n_kept"] for step in steps) / max(1, sum(step["n_sampled"] for step in steps)),
        "geo_share": geo_shares(run_dir, 0.99, 1.01),
        "lag_mean": lag_of(run_dir),
        "kl_mean": math.fsum(step["kl_mean"] or 0.0 for step in steps) / len(steps),
        "train_s": interval([step["train_s"] for step in steps])["mean"],
        "wait_s": interval([step["wait_s"] for step in steps])["mean"],
        "log_s": interval([step["log_s"] for step in steps])["mean"],
        "refit_s": interval([sum(refit[k] for k in ("pause_s", "transfer_s", "verify_s", "resume_s")) for refit in refits])["mean"],
        "log_root": root_of(run_dir),
        "steps": [[step["step"], step["reward_mean"], round(step["n_kept"] / max(1, step["n_sampled"]), 4)] for step in steps],
    }


def compare(parts: Parts, facts: dict[str, Any]) -> None:
    """Over seeds: means of the windows with Student's 95 % intervals, by lag and correction."""
    runs = [run for run in parts.facts["runs"].values() if isinstance(run, dict) and "reward_last" in run]
    num_common = min(run["num_steps"] for run in runs)
    facts["steps_of_all_runs"] = num_common
    facts["published"] = {"what": "AIME24 by max lag, naive and decoupled; AReaL, its own model; the shape is what compares", **AREAL}
    for key in sorted({(run["max_lag"], run["correction"], run["dtype"]) for run in runs}):
        own = [run for run in runs if (run["max_lag"], run["correction"], run["dtype"]) == key]
        first, last = (over_seeds([run[name]["mean"] for run in own]) for name in ("reward_first", "reward_last"))
        share = math.fsum(run["effective_share"] for run in own) / len(own)
        at_common = [math.fsum(step[1] for step in run["steps"][:num_common][-WINDOW:]) / min(WINDOW, num_common) for run in own]
        facts[f"lag {key[0]}, {key[1]}, {key[2]}"] = {
            "num_seeds": len(own),
            "first": first,
            "last": last,
            "gain": last["mean"] - first["mean"],
            "is_apart": first["mean"] + first["half"] < last["mean"] - last["half"],
            "last_at_common_step": over_seeds(at_common),
            "effective_share": share,
            "geo_share": {name: math.fsum(run["geo_share"][name] for run in own) / len(own) for name in own[0]["geo_share"]},
        }
        print(
            f"lag {key[0]:2} {key[1]:24} {key[2]:9} {first['mean']:.3f} -> {last['mean']:.3f}, {sum(at_common) / len(own):.3f} at step "
            f"{num_common}, kept {share:.3f}, geo {own[0]['geo_share']}  ({len(own)} seeds)",
            flush=True,
        )


def over_seeds(means: list[float]) -> dict[str, float]:
    """Mean and half width of Student's 95 % interval over seeds; the width is NaN for one seed."""
    found = interval(means)
    if len(means) < 2:
        return {"mean": found["mean"], "half": math.nan}
    return {"mean": found["mean"], "half": found["ci95"] / 1.96 * T_975.get(len(means), 1.96)}


if __name__ == "__main__":
    raise SystemExit(main())
