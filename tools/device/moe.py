"""A mixture of experts, without and with routing replay: distance of engine and trainer per token through the log, over 20 steps.

python -m tools.device.moe --limit-s 300 [--rehearse] [--layers 3] [--steps 20]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from tools.device.parts import Child, Parts, flags, molt, parser
from tools.device.readings import events_of, refits_of, steps_of
from tools.device.world import World, make_world


def main() -> int:
    """Both runs; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--implementation", default="hf", choices=["hf", "automodel"])
    arguments = made.parse_args()
    parts = Parts("moe", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
    held: dict[str, Any] = {}

    def prepare(facts: dict[str, Any]) -> None:
        held["world"] = make_world(arguments.work, is_rehearsal=arguments.rehearse)
        held["model"] = make_moe(held["world"], arguments)
        facts |= {"model": str(held["model"]), "parameters": _num_parameters(held["model"])}

    if parts.run("world", prepare):
        parts.run("without", lambda facts: run(arguments, parts, held, facts, is_replayed=False), needs_s=60)
        parts.run("with", lambda facts: run(arguments, parts, held, facts, is_replayed=True), needs_s=60)
        parts.run("ratio", lambda facts: compare(parts, facts))
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


def make_moe(world: World, arguments: argparse.Namespace) -> Path:
    """A random Qwen3-MoE of the 30B-A3B's widths and few layers, with the tokenizer of the dense model; tiny in a rehearsal."""
    import shutil

    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = arguments.work / (f"moe-{arguments.layers}" if not arguments.rehearse else "moe-tiny")
    if (folder / "config.json").is_file():
        return folder
    vocabulary = AutoConfig.from_pretrained(str(world.model)).vocab_size
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": arguments.layers,
    }
    if arguments.rehearse:
        sizes |= {
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        sizes |= {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.04, **sizes
    )
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
    model.to(torch.float32 if arguments.rehearse else torch.bfloat16).save_pretrained(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json"):
        if (world.model / name).is_file():
            shutil.copy(world.model / name, folder / name)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def run(arguments: argparse.Namespace, parts: Parts, held: dict[str, Any], facts: dict[str, Any], *, is_replayed: bool) -> None:
    """A strictly on-policy run, so that the distance is that of the kernels and routers alone."""
    small = arguments.rehearse
    name = f"moe-{'with' if is_replayed else 'without'}-{time.strftime('%H%M%S')}"
    settings: dict[str, Any] = {
        "run.dir": arguments.work / "runs",
        "run.name": name,
        "actor.model_name_or_path": held["model"],
        "actor.dtype": "float32" if small else "bfloat16",
        "actor.implementation": arguments.implementation,
        "actor.learning_rate": 1e-6,
        "data.prompt_dataset": held["world"].prompts,
        "data.max_len": 160 if small else 384,
        "train.agent_path": held["world"].agent,
        "train.num_steps": 2 if small else arguments.steps,
        "train.batch_size": 8 if small else 64,
        "train.micro_batch_tokens": 512 if small else 16384,
        "train.async_queue_size": 0,
        "train.weights_digest_interval": 0,
        "train.routing_replay": is_replayed,
        "rollout.batch_size": 2 if small else 8,
        "rollout.n_samples_per_prompt": 4 if small else 8,
        "rollout.max_new_tokens": 8 if small else 192,
        "rollout.max_concurrency": 128,
        "algo.advantage.estimator": "grpo",
        "ckpt.export": False,
        "vllm.engine": arguments.engine or ("embedded" if small else "vllm"),
        "placement.trainer": "colocated",
    }
    if not small:
        settings |= {"vllm.kv_cache_space_gib": 4, "vllm.compile": False, "vllm.gpu_memory_utilization": 0.25}
        settings["vllm.weight_transfer"] = "ipc" if arguments.ipc else "file"
    child = Child(molt("train", *flags(settings)), log=parts.logs / f"{name}.log")
    facts["exit_code"] = child.wait(parts.left_s - 10)
    run_dir = arguments.work / "runs" / name
    steps = steps_of(run_dir)
    if not steps:
        raise RuntimeError(child.tail())
    facts |= {
        "num_steps": len(steps),
        "kl_by_step": [step["kl_mean"] for step in steps],
        "gap": gaps(run_dir),
        "train_s": float(np.mean([step["train_s"] for step in steps[1:] or steps])),
        "refits": refits_of(run_dir)[-2:],
        "routing": [body["metrics"] for body in events_of(run_dir, "step_trained")][-1],
    }


def gaps(run_dir: Path) -> dict[str, Any]:
    """|trainer - engine| per trained token of the whole run, nats."""
    from molt.log.reader import LogReader

    cut = LogReader.open(run_dir).cut()
    scores = cut.table("scores", ["segment_id", "trainer_logprobs"]).to_pylist()
    segments = {row["segment_id"]: row for row in cut.table("segments", ["segment_id", "behaviour_logprobs", "spans"]).to_pylist()}
    found = []
    for score in scores:
        row = segments[score["segment_id"]]
        sources = np.repeat([span["source"] == "policy" for span in row["spans"]], [span["len"] for span in row["spans"]])
        behaviour = np.array(row["behaviour_logprobs"], dtype=np.float64)[sources]
        found.append(np.abs(np.array(score["trainer_logprobs"], dtype=np.float64) - behaviour))
    every = np.concatenate(found)
    return {
        "mean": float(every.mean()),
        "p99": float(np.quantile(every, 0.99)),
        "max": float(every.max()),
        "num_tokens": len(every),
    }


def compare(parts: Parts, facts: dict[str, Any]) -> None:
    """What replay changes."""
    without, with_replay = parts.facts["without"], parts.facts["with"]
    facts["gap_ratio"] = with_replay["gap"]["mean"] / without["gap"]["mean"]
    facts["kl_without"] = float(np.mean(without["kl_by_step"]))
    facts["kl_with"] = float(np.mean(with_replay["kl_by_step"]))


def _num_parameters(folder: Path) -> int:
    from molt.rollout.weights import tensor_shapes

    return int(sum(np.prod(shape) for shape in tensor_shapes(str(folder)).values()))


if __name__ == "__main__":
    raise SystemExit(main())
