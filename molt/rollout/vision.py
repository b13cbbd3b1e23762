"""The eyes of a Hugging Face model: which class loads it, its vision tower and connector, and features of images from processor tensors.

Axes: F features of all images, D hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from molt.model_shape import IMAGE_FAMILIES

TILES_AT_ONCE = 32
"""Tiles in one pass of the tower: of 512 pixels in patches of 16, 32,768 patches."""


def model_class(config: Any) -> Any:
    """The transformers class that loads a model with this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in IMAGE_FAMILIES else AutoModelForCausalLM


def has_eyes(lm: Any) -> bool:
    """Whether a model takes images."""
    return getattr(getattr(lm, "config", None), "model_type", None) in IMAGE_FAMILIES


def eyes(lm: Any) -> list[nn.Module]:
    """Vision tower and connector: what an engine's cache of image features depends on."""
    return [lm.model.vision_model, lm.model.connector]


def image_features(lm: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Features of images, tiles after tiles, as the language model takes them; a few tiles are looked at together. # (F, D)"""
    parts = []
    for some in zip(*(tensor.split(TILES_AT_ONCE) for tensor in tensors.values()), strict=True):
        # The model takes tiles of a batch of prompts, (prompts, tiles, ...): here all are of one prompt.
        given = {name: tensor[None] for name, tensor in zip(tensors, some, strict=True)}
        parts.append(lm.model.get_image_features(**given, return_dict=True).pooler_output.flatten(0, 1))
    return torch.cat(parts)


def features_per_tile(lm: Any) -> int:
    """Features that the model makes of one tile."""
    vision = lm.config.vision_config
    return int((vision.image_size // vision.patch_size // lm.config.scale_factor) ** 2)


def blank_tensors(lm: Any) -> dict[str, torch.Tensor]:
    """Tensors of one white tile, for a pass that shows none. The model skips a tile that is all zeros."""
    size = int(lm.config.vision_config.image_size)
    return {
        "pixel_values": torch.ones((1, 3, size, size)),
        "pixel_attention_mask": torch.ones((1, size, size), dtype=torch.bool),
    }
