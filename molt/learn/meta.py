"""The parameters of a model from its config.json alone: built on the meta device, so that neither weights nor memory are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Eyes:
    """Vision tower and connector of a model that takes images."""

    parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    pixels: int
    """Numbers of a tile: three for each of its pixels."""
    patches: int
    """Of a tile."""
    features: int
    """Tokens of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters, whole and by what layouts do with them."""

    total: int
    embedding: int
    head: int
    """0 where it is tied to the embedding."""
    experts: int
    """In all layers."""
    layer: int
    """The largest layer, its experts included."""
    layer_experts: int
    """Experts of that layer."""
    uncut: int
    """What tensor parallelism leaves whole: norms, routers, biases."""
    eyes: Eyes | None = None


def count_parameters(folder: str | Path) -> Parameters:
    """Count them as transformers builds the model. Raises SettingError for a model that it does not know."""
    import torch
    from transformers import AutoConfig

    from molt.rollout.vision import model_class

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            lm = model_class(config).from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise SettingError(f"actor.model_name_or_path={folder}, transformers cannot build it: {error}") from error
    from molt.learn.model import decoder_blocks

    sizes = {name: parameter.numel() for name, parameter in lm.named_parameters()}
    embedding = lm.get_input_embeddings().weight
    head = lm.get_output_embeddings()
    layers = [
        (sum(p.numel() for p in block.parameters()), sum(p.numel() for name, p in block.named_parameters() if ".experts." in name))
        for block in decoder_blocks(lm)
    ]
    layer, layer_experts = max(layers, default=(0, 0))
    uncut = sum(p.numel() for name, p in lm.named_parameters() if p.dim() < 2 or name.endswith((".gate.weight", ".router.weight")))
    return Parameters(
        total=sum(sizes.values()),
        embedding=embedding.numel(),
        head=0 if head is None or head.weight is embedding else head.weight.numel(),
        experts=sum(size for name, size in sizes.items() if ".experts." in name),
        layer=layer,
        layer_experts=layer_experts,
        uncut=uncut,
        eyes=_eyes(lm),
    )


def _eyes(lm: Any) -> Eyes | None:
    """Sizes of what sees; None for a model that takes no images."""
    from molt.rollout.vision import eyes, features_per_tile, has_eyes

    if not has_eyes(lm):
        return None
    vision = lm.config.vision_config
    return Eyes(
        parameters=sum(p.numel() for module in eyes(lm) for p in module.parameters()),
        num_layers=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        pixels=3 * vision.image_size**2,
        patches=(vision.image_size // vision.patch_size) ** 2,
        features=features_per_tile(lm),
    )
