"""NeMo AutoModel on the card: its distance from the engine beside the Hugging Face class's, and a run of it with refits, audit and replay.

python -m tools.device.automodel --limit-s 200 [--rehearse] [--card 0] [--attention te]
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tools.device.parts import Child, Parts, flags, molt, parser
from tools.device.readings import refits_of, root_of, steps_of
from tools.device.world import World, make_world

SEAMS = ("hf", "automodel")


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--card", type=int, default=0, help="GPU to run on")
    made.add_argument("--seams", nargs="*", default=SEAMS, choices=SEAMS, help="classes whose parity is measured")
    made.add_argument("--attention", default="sdpa", choices=["sdpa", "te", "flex"], help="of AutoModel's layers, in parity and run")
    arguments = made.parse_args()
    name = "automodel" if arguments.attention == "sdpa" else f"automodel-{arguments.attention}"
    parts = Parts(name, arguments.out, work=arguments.work, limit_s=arguments.limit_s)
    small = arguments.rehearse
    held: dict[str, World] = {}
    children: dict[str, Child] = {}
    run_dir = arguments.work / "runs" / f"automodel-{time.strftime('%H%M%S')}"
    env = {} if small else {"CUDA_VISIBLE_DEVICES": str(arguments.card)}

    def world(facts: dict[str, Any]) -> None:
        held["world"] = make_world(arguments.work, is_rehearsal=small)
        facts["model"] = held["world"].model.name

    def start(facts: dict[str, Any]) -> None:
        engine = arguments.engine or ("embedded" if small else "vllm")
        for seam in arguments.seams:
            if seam == "automodel" and small:
                continue  # it needs a GPU to be made
            own = common(held["world"], engine, small=small) | {"actor.implementation": seam, "train.async_queue_size": 0}
            own |= {"fsdp.attn_implementation": arguments.attention} if seam == "automodel" else {}
            command = molt("parity", *flags(own), "--samples", "2" if small else "16", "--json")
            children[seam] = Child(command, log=parts.logs / f"automodel-parity-{seam}.log", env=env)
        own = common(held["world"], engine, small=small) | run_settings(held["world"], run_dir, arguments.attention, small=small)
        children["run"] = Child(molt("train", *flags(own)), log=parts.logs / "automodel-run.log", env=env)
        facts["started"] = list(children)

    def parity(seam: str, facts: dict[str, Any]) -> None:
        facts["exit_code"] = children[seam].wait(parts.left_s - 20)
        facts["report"] = last_json(children[seam])

    def run(facts: dict[str, Any]) -> None:
        facts["exit_code"] = children["run"].wait(parts.left_s - 30)
        steps = steps_of(run_dir)
        if facts["exit_code"] != 0 or not steps:
            raise RuntimeError(children["run"].tail())
        facts |= {"num_steps": len(steps), "last": steps[-1], "refits": refits_of(run_dir)[-2:], "log_root": root_of(run_dir)}

    def verb(name: str, facts: dict[str, Any], *words: str) -> None:
        child = Child(molt(name, str(run_dir), *words), log=parts.logs / f"automodel-{name}.log", env=env)
        facts["exit_code"] = child.wait(min(90.0, parts.left_s - 5))
        if facts["exit_code"] != 0:
            raise RuntimeError(child.tail())
        facts["says"] = child.tail(300)

    if parts.run("world", world) and parts.run("start", start):
        for seam in SEAMS:
            if seam in children:
                parts.run(f"parity_{seam}", lambda facts, seam=seam: parity(seam, facts))
        if parts.run("run", run):
            parts.run("audit", lambda facts: verb("audit", facts), needs_s=10)
            parts.run("replay", lambda facts: verb("replay", facts, "--steps", "3"), needs_s=25)
    for child in children.values():
        child.end()
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


def common(world: World, engine: str, *, small: bool) -> dict[str, Any]:
    """Settings of engine and model."""
    own: dict[str, Any] = {
        "actor.model_name_or_path": world.model,
        "actor.dtype": "float32" if small else "bfloat16",
        "data.max_len": world.max_len,
        "train.micro_batch_tokens": 512 if small else 16384,
        "rollout.max_new_tokens": 16 if small else 64,
        "vllm.engine": engine,
        "placement.trainer": "colocated",
    }
    if not small:
        own |= {"vllm.kv_cache_space_gib": 4, "vllm.gpu_memory_utilization": 0.1, "vllm.enforce_eager": True}
    return own


def run_settings(world: World, run_dir: Path, attention: str, *, small: bool) -> dict[str, Any]:
    """Settings of the asynchronous run."""
    own: dict[str, Any] = {} if small else {"fsdp.attn_implementation": attention}
    if attention == "te":
        own |= {"train.micro_batch_tokens": 1024, "train.num_steps": 4}  # its deterministic kernels take memory by the cube of the first
    return {
        "run.dir": run_dir.parent,
        "run.name": run_dir.name,
        "actor.implementation": "hf" if small else "automodel",
        "actor.learning_rate": 1e-5,
        "data.prompt_dataset": world.prompts,
        "train.agent_path": world.agent,
        "train.num_steps": 2 if small else 8,
        "train.batch_size": 8 if small else 128,
        "train.deterministic": not small,
        "rollout.batch_size": 2 if small else 16,
        "rollout.n_samples_per_prompt": 4 if small else 8,
        "rollout.max_concurrency": 16 if small else 256,
        "algo.advantage.estimator": "grpo",
        "vllm.weight_transfer": "file",
    } | own


def last_json(child: Child) -> Any:
    """The JSON document that a verb printed, without what came before it."""
    text = child.log.read_text(errors="replace")
    for place, line in enumerate(lines := text.splitlines()):
        if line in ("{", "[") or line.startswith('{"'):
            try:
                return json.loads("\n".join(lines[place:]))
            except json.JSONDecodeError:
                continue
    return text[-1500:]


if __name__ == "__main__":
    raise SystemExit(main())
