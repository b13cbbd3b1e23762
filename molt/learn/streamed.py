"""Weights read from a model folder straight into the shards of a rank, so that no process ever holds the whole model.

    config.json -> layers without weights (meta device) -> cut and sharded -> each shard reads its own slices of the safetensors files

transformers brings the layers, the names and shapes of its checkpoints (experts are fused on the way), the slices of a DTensor, and the
buffers that no file holds; what comes out equals from_pretrained in every bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from molt.errors import SettingError
from molt.rollout.vision import model_class

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def empty_model(folder: Path, *, attention: str | dict[str, str]) -> Any | None:
    """The language model of a folder in float32 without weights; None where they cannot be read by shard: other files than safetensors,
    quantized ones, or a checkpoint that holds tied weights apart."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if not weight_files(folder) or getattr(config, "quantization_config", None) is not None:
        return None
    config.name_or_path = str(folder)
    with torch.device("meta"):
        lm = model_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
    tied = dict(lm.all_tied_weights_keys)
    with _slices(folder) as slices:
        return None if any(name in slices and source in slices for name, source in tied.items()) else lm.eval()


def fill(lm: Any, folder: Path, device: torch.device) -> None:
    """Read the weights of a model that is sharded on the meta device, each rank its own part. Raises SettingError for a folder that
    lacks some."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    lm.all_tied_weights_keys = {name: source for name, source in lm.all_tied_weights_keys.items() if _has(lm, name)}
    plan = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": device},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(lm),
    )
    with _quiet(), _slices(folder) as slices:
        found, _ = convert_and_load_state_dict_in_model(lm, slices, plan)
        _refuse([*(name for name, *_ in found.mismatched_keys), *found.conversion_errors], folder, "has another shape than the model")
        found = type(lm)._finalize_model_loading(lm, plan, found)  # buffers, ties
    _refuse(list(found.missing_keys), folder, "is in none of its files")


def _refuse(names: list[str], folder: Path, why: str) -> None:
    """SettingError when there are any."""
    if names:
        raise SettingError(
            f"actor.model_name_or_path={folder}, {min(names)} {why} ({len(names)} such weights); give the folder of a whole model"
        )


def own(module: nn.Module, device: torch.device) -> None:
    """Let what was read lie in memory of this process: on the CPU it is a view of the file until then. device: for buffers."""
    module._apply(lambda tensor: tensor.clone() if _is_mapped(tensor) else tensor)
    for part in module.modules():
        part._buffers.update({name: None if buffer is None else buffer.to(device) for name, buffer in part._buffers.items()})


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the part of a tensor on this rank lies in memory that torch did not allocate, such as a mapped file."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not part.untyped_storage().resizable()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, as its index names them; none where it has another format."""
    if (index := folder / INDEX).is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


@contextmanager
def _slices(folder: Path) -> Iterator[dict[str, Any]]:
    """Tensors of a folder by name, none of them read yet."""
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(folder)]
        yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)


@contextmanager
def _quiet() -> Iterator[None]:
    """No report of names that a checkpoint has beyond the model's, such as draft layers; what is missing is refused."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _has(lm: nn.Module, name: str) -> bool:
    """Whether a model has a parameter of that name; a critic has no output head."""
    module, _, parameter = name.rpartition(".")
    return hasattr(lm.get_submodule(module), parameter)
