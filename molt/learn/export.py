"""Export of the policy as a Hugging Face folder: safetensors, config with the dtype at every level, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from molt.learn.checkpoint import sync
from molt.settings_rules import EXPORTED

CARRIED = (
    "tokenizer",
    "tekken",
    "spiece",
    "sentencepiece",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
    "chat_template",
    "generation_config",
    "preprocessor",
    "video_preprocessor",
    "processor",
)
"""Beginnings of the names of files that go along unchanged."""


def export(tensors: dict[str, torch.Tensor], config: dict[str, Any], *, source: Path, target: Path, dtype: torch.dtype) -> Path:
    """Write a model folder that loads in transformers and vLLM; it appears under its name when it is complete.

    tensors: whole tensors under checkpoint names. config: the model's config. source: where the tokenizer comes from.
    """
    from huggingface_hub import save_torch_state_dict

    partial = target.parent / f".partial-{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    floats = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_torch_state_dict({name: t.contiguous() for name, t in floats.items()}, partial, max_shard_size="4GB")
    (partial / "config.json").write_text(json.dumps(with_dtype(config, dtype), indent=2))
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name.startswith(CARRIED) and not file.name.endswith(".safetensors"):
            shutil.copyfile(file, partial / file.name)
    (partial / EXPORTED).touch()
    for file in partial.iterdir():
        sync(file)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    sync(target.parent)
    return target


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with its dtype set, in nested configs too, so that an engine builds what the file holds."""
    name = str(dtype).removeprefix("torch.")
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            value = with_dtype(value, dtype)
        result[key] = value
    result.pop("torch_dtype", None)
    return result | {"dtype": name}
