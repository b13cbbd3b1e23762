"""Every estimator live on the demo's task, a few seeds each: mean reward of the first and of the last steps, and the run to look at."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
from pathlib import Path

from molt.cli.programs import load_program
from molt.config import Config
from molt.log.reader import LogReader

TEACHER = "grpo-0/checkpoints/final"
"""What grpo made under seed 0."""
FLAGS: dict[str, dict[str, object]] = {
    "grpo": {},
    "reinforce": {},
    "reinforce_baseline": {},
    "rloo": {},
    "dr_grpo": {},
    "flash_reinforce": {"rollout.n_samples_per_prompt": 1, "rollout.batch_size": 64},
    "gae": {"critic.learning_rate": 1e-3, "algo.advantage.lambd": 0.95},
    "on_policy_distill": {"reference.model_name_or_path": TEACHER},
}
"""Settings of each estimator beside those of the demo."""
WINDOW = 5
"""Steps at either end whose rewards are averaged."""


def main() -> int:
    """Print one row an estimator and a JSON file with all of it; runs that are finished are not made again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the world and the runs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--estimators", nargs="*", default=list(FLAGS))
    given = parser.parse_args()
    make_world(given.dir)
    found: dict[str, list[dict[str, float]]] = {}
    for name in given.estimators:
        for seed in given.seeds:
            run = given.dir / f"{name}-{seed}"
            if not (run / "finished").is_file():
                shutil.rmtree(run, ignore_errors=True)
                asyncio.run(load_program("rl").main(settings(given.dir, name, seed, given.steps)))
                (run / "finished").touch()
            found.setdefault(name, []).append(rewards(run))
    (given.dir / "estimators.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    print("| estimator | first steps | last steps | rise, by seed |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        first, last = (statistics.fmean(run[end] for run in runs) for end in ("first", "last"))
        rises = ", ".join(f"{run['last'] - run['first']:+.2f}" for run in runs)
        print(f"| {name} | {first:.3f} | {last:.3f} | {rises} |")
    return 0


def make_world(where: Path) -> None:
    """The demo's model and task."""
    if not (where / "ready").is_file():
        where.mkdir(parents=True, exist_ok=True)
        load_program("demo").make_world(where)
        (where / "ready").touch()


def settings(where: Path, name: str, seed: int, num_steps: int) -> Config:
    """The demo's settings under an estimator and a seed."""
    own: dict[str, object] = {"algo.advantage.estimator": name, "run.seed": seed, "train.num_steps": num_steps, "ckpt.save_interval": 0}
    own |= {key: where / TEACHER if value == TEACHER else value for key, value in FLAGS[name].items()}
    flags = tuple(f"--{key}={value}" for key, value in own.items())
    return load_program("demo").settings(where, runs=where, name=f"{name}-{seed}", flags=flags)


def rewards(run: Path) -> dict[str, float]:
    """Mean reward of the first and the last steps of a run."""
    by_step = load_program("demo").rewards_by_step(LogReader.open(run))
    return {"first": statistics.fmean(by_step[:WINDOW]), "last": statistics.fmean(by_step[-WINDOW:])}


if __name__ == "__main__":
    sys.exit(main())
