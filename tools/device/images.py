"""Images on the card: a random model of SmolVLM-256M's shape through vLLM, log and trainer, its tower frozen and learning.

Parity on texts and pictures; of each run the distance between engine and trainer per token, tokens of images, which caches refits dropped,
the audit, and a replay from the log with the pictures gone.

python -m tools.device.images --limit-s 300 [--rehearse] [--card 0]
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.device.automodel import last_json
from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.readings import gaps, refits_of, root_of, steps_of
from tools.device.world import make_smollm2

SMOLVLM_256M: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": 4, "tie_word_embeddings": False,
    "pad_token_id": 0,
    "text_config": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280, "max_position_embeddings": 8192, "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    },
}  # fmt: skip
"""The shape of the published HuggingFaceTB/SmolVLM-256M-Instruct: 256,484,928 parameters."""
TILES = 2
"""Tiles along the longer edge of a picture, each of 64 tokens; the published processor makes 4."""
MARKERS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}{{- '<image>' if part['type'] == 'image' else part['text'] -}}{%- endfor -%}"
    "{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What the runs are about."""

    model: Path
    shapes: Path
    """Folder of prompts.jsonl and the pictures."""


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--card", type=int, default=0, help="GPU to run on")
    made.add_argument("--runs", nargs="+", default=("frozen", "learning"), choices=("frozen", "learning"), help="what becomes of the tower")
    arguments = made.parse_args()
    parts = Parts("images", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
    small = arguments.rehearse
    engine = arguments.engine or ("embedded" if small else "vllm")
    env = {} if small else {"CUDA_VISIBLE_DEVICES": str(arguments.card)}
    stamp = time.strftime("%H%M%S")
    held: dict[str, Pictures] = {}
    run_dirs: dict[str, Path] = {}

    def world(facts: dict[str, Any]) -> None:
        held["world"] = make_world(arguments.work, small=small, tokenizer=arguments.tokenizer, facts=facts)

    def run(kind: str, facts: dict[str, Any]) -> None:
        run_dir = arguments.work / "runs" / f"images-{kind}-{stamp}"
        own = settings(held["world"], run_dir, engine, is_frozen=kind == "frozen", small=small)
        own["vllm.weight_transfer"] = "ipc" if arguments.ipc else "file"
        child = Child(molt("train", *flags(own)), log=parts.logs / f"images-{kind}.log", env=env)
        facts["exit_code"] = child.wait(parts.left_s - 40)
        steps = steps_of(run_dir)
        if facts["exit_code"] != 0 or not steps:
            raise RuntimeError(child.tail())
        facts |= {"num_steps": len(steps), "last": steps[-1], "refits": refits_of(run_dir)[-2:], "log_root": root_of(run_dir)}
        facts |= shown(run_dir) | gaps(run_dir)
        run_dirs[kind] = run_dir

    def verb(name: str, kind: str, facts: dict[str, Any], *words: str) -> None:
        child = Child(molt(name, str(run_dirs[kind]), *words), log=parts.logs / f"images-{kind}-{name}.log", env=env)
        facts["exit_code"] = child.wait(min(120.0, parts.left_s - 5))
        if facts["exit_code"] != 0:
            raise RuntimeError(child.tail())
        facts["says"] = child.tail(300)

    def replay(kind: str, facts: dict[str, Any]) -> None:
        pictures = held["world"].shapes
        gone = pictures.with_name("gone")
        shutil.move(pictures, gone)
        try:
            verb("replay", kind, facts, "--steps", "2")
        finally:
            shutil.move(gone, pictures)

    def parity(facts: dict[str, Any]) -> None:
        own = common(held["world"], engine, small=small)
        child = Child(molt("parity", *flags(own), "--samples", "4", "--json"), log=parts.logs / "images-parity.log", env=env)
        facts["exit_code"] = child.wait(parts.left_s - 20)
        facts["report"] = last_json(child)

    if parts.run("world", world):
        parts.run("parity", parity, needs_s=60)
        for kind in arguments.runs:
            if parts.run(f"run_{kind}", lambda facts, kind=kind: run(kind, facts), needs_s=30):
                parts.run(f"audit_{kind}", lambda facts, kind=kind: verb("audit", kind, facts), needs_s=10)
                parts.run(f"replay_{kind}", lambda facts, kind=kind: replay(kind, facts), needs_s=25)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


def common(world: Pictures, engine: str, *, small: bool) -> dict[str, Any]:
    """Settings of engine and model."""
    own: dict[str, Any] = {
        "actor.model_name_or_path": world.model,
        "actor.dtype": "float32" if small else "bfloat16",
        "data.max_len": 320 if small else 1280,
        "data.max_images": 2,
        "train.micro_batch_tokens": 640 if small else 16384,
        "rollout.max_new_tokens": 8 if small else 32,
        "vllm.engine": engine,
        "placement.trainer": "colocated",
    }
    if engine == "vllm":
        own |= {"vllm.kv_cache_space_gib": 1 if small else 4, "vllm.enforce_eager": True}
    if not small:
        own |= {"vllm.gpu_memory_utilization": 0.1}
    return own


def settings(world: Pictures, run_dir: Path, engine: str, *, is_frozen: bool, small: bool) -> dict[str, Any]:
    """Two looks at a picture, strictly on-policy, so that every token is scored by the weights that sampled it."""
    own = common(world, engine, small=small) | {
        "run.dir": run_dir.parent,
        "run.name": run_dir.name,
        "actor.learning_rate": 1e-4,
        "actor.gradient_checkpointing": True,
        "data.prompt_dataset": world.shapes / "prompts.jsonl",
        "train.agent_path": ROOT / "examples" / "count_shapes_agent.py",
        "train.num_steps": 2 if small else 4,
        "train.batch_size": 8 if small else 64,
        "train.async_queue_size": 0,
        "train.deterministic": not small,
        "rollout.batch_size": 2 if small else 8,
        "rollout.n_samples_per_prompt": 4 if small else 8,
        "algo.advantage.estimator": "reinforce",
        "algo.loss.entropy_coef": 0.01,  # random weights earn nothing: what moves them is the entropy
    }
    if not is_frozen:
        own["actor.freeze_vision"] = False
    return own


def shown(run_dir: Path) -> dict[str, Any]:
    """Images, their tokens and features, ends of rollouts, bytes in the log, and caches that refits dropped."""
    from molt.audit.views import open_audit

    with open_audit(run_dir) as asked:
        rows = asked.sql(
            """
            with looked as (
                select len(list_filter(media, lambda m: m.name = 'image')) as num_images,
                       list_max(list_transform(media, lambda m: m.len)) as longest,
                       list_sum(list_transform(list_filter(spans, lambda s: s.source = 'image'), lambda s: s.len)) as num_features
                from segments
            )
            select count(*), sum(num_images), max(longest), sum(num_features) from looked
            """
        ).fetchall()[0]
        ends = dict(asked.sql("select stop_reason, count(*) from segments group by stop_reason").fetchall())
        kept = {
            kind: [n, size] for kind, n, size in asked.sql("select kind, count(*), sum(size_bytes) from payloads group by kind").fetchall()
        }
        caches = [row[0] for row in asked.sql("select distinct array_to_string(caches, ',') from weights_refit").fetchall()]
    names = ("num_segments", "num_images", "tokens_per_image", "num_features")
    return {**dict(zip(names, rows, strict=True)), "ends": ends, "payloads": kept, "caches_dropped": caches}


def make_world(work: Path, *, small: bool, tokenizer: Path | None, facts: dict[str, Any]) -> Pictures:
    """The model and its pictures, made where they are not there yet."""
    from molt.data.tiny_vision import make_pictures, make_vision_model

    model = work / ("tiny-vision" if small else "smolvlm")
    if small and not (model / "config.json").is_file():
        make_vision_model(model, num_tiles=2, spread=0.1)
    elif not small:
        make_smolvlm(model, tokenizer=tokenizer or find_tokenizer(work, facts))
    shapes = work / "shapes"
    if not (shapes / "prompts.jsonl").is_file():
        make_pictures(shapes, num_prompts=64, num_pixels=48 if small else 512)
    facts |= {"model": model.name, "size_bytes": (model / "model.safetensors").stat().st_size}
    return Pictures(model=model, shapes=shapes)


def find_tokenizer(work: Path, facts: dict[str, Any]) -> Path | None:
    """SmolLM2's tokenizer, where its pieces came along; None leaves a tokenizer of bytes."""
    try:
        folder = make_smollm2(work)
    except Exception as error:
        facts["tokenizer"] = f"bytes, since SmolLM2's is not there ({type(error).__name__})"
        return None
    facts["tokenizer"] = "SmolLM2"
    return folder


def make_smolvlm(folder: Path, *, tokenizer: Path | None = None, seed: int = 0) -> Path:
    """A random model of SmolVLM-256M's shape with a processor of its own. tokenizer: a folder whose tokenizer knows <|im_start|>."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    from molt.data.tiny import make_tokenizer
    from molt.data.tiny_vision import TEMPLATE as BYTES_TEMPLATE

    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if tokenizer is None:
        make_tokenizer(partial)
    template = BYTES_TEMPLATE if tokenizer is None else TEMPLATE
    words = AutoTokenizer.from_pretrained(str(tokenizer or partial), local_files_only=True)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*MARKERS, *places)], special_tokens=True)
    words.chat_template = template
    edge = int(SMOLVLM_256M["vision_config"]["image_size"])
    eyes = Idefics3ImageProcessorPil(size={"longest_edge": TILES * edge}, max_image_size={"longest_edge": edge})
    Idefics3Processor(image_processor=eyes, tokenizer=words, image_seq_len=64, chat_template=template).save_pretrained(str(partial))
    config = Idefics3Config(**SMOLVLM_256M, image_token_id=words.convert_tokens_to_ids("<image>"), eos_token_id=words.eos_token_id)
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)  # logits that are not flat
    model.generation_config.eos_token_id = words.eos_token_id
    model.to(torch.bfloat16).save_pretrained(str(partial))
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
