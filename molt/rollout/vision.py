"""The eyes of a Hugging Face model: which class loads it, its vision tower and connector, and features of images from processor tensors.

A family says where its parts are and how it takes tiles. Axes: F features of all images, D hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from molt.model_shape import IMAGE_FAMILIES

TILES_AT_ONCE = 32
"""Tiles in one pass of the tower: of 512 pixels in patches of 16, 32,768 patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models is made; names are of parts of its inner model."""

    tower: str
    connector: str
    text: str
    has_prompt_axis: bool
    """Whether tiles are given by prompt, (prompts, tiles, ...), with a mask of their pixels."""


FAMILIES = {
    "idefics3": Family(tower="vision_model", connector="connector", text="text_model", has_prompt_axis=True),
    "llava": Family(tower="vision_tower", connector="multi_modal_projector", text="language_model", has_prompt_axis=False),
}
assert tuple(FAMILIES) == IMAGE_FAMILIES, "the reader tier knows the families by the same names"


def model_class(config: Any) -> Any:
    """The transformers class that loads a model with this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def has_eyes(lm: Any) -> bool:
    """Whether a model takes images."""
    return getattr(getattr(lm, "config", None), "model_type", None) in FAMILIES


def eyes(lm: Any) -> list[nn.Module]:
    """Vision tower and connector: what an engine's cache of image features depends on."""
    family = FAMILIES[lm.config.model_type]
    return [getattr(lm.model, family.tower), getattr(lm.model, family.connector)]


def language_model(lm: Any) -> nn.Module:
    """The part that reads embeddings, without its head."""
    found: nn.Module = getattr(lm.model, FAMILIES[lm.config.model_type].text)
    return found


def image_features(lm: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Features of images, tiles after tiles, as the language model takes them; a few tiles are looked at together. # (F, D)"""
    has_prompt_axis = FAMILIES[lm.config.model_type].has_prompt_axis
    parts = []
    for some in zip(*(tensor.split(TILES_AT_ONCE) for tensor in tensors.values()), strict=True):
        given = {name: tensor[None] if has_prompt_axis else tensor for name, tensor in zip(tensors, some, strict=True)}
        parts += [tile.flatten(0, -2) for tile in lm.model.get_image_features(**given, return_dict=True).pooler_output]
    return torch.cat(parts)


def features_per_tile(lm: Any) -> int:
    """Features that the model makes of one tile."""
    vision = lm.config.vision_config
    edge = vision.image_size // vision.patch_size
    if lm.config.model_type == "llava":
        return int(edge**2) + (lm.config.vision_feature_select_strategy == "full" and "clip" in vision.model_type)
    return int((edge // lm.config.scale_factor) ** 2)


def blank_tensors(lm: Any) -> dict[str, torch.Tensor]:
    """Tensors of one white tile, for a pass that shows none. A model may skip a tile that is all zeros."""
    size = int(lm.config.vision_config.image_size)
    tensors = {"pixel_values": torch.ones((1, 3, size, size))}
    if FAMILIES[lm.config.model_type].has_prompt_axis:
        tensors["pixel_attention_mask"] = torch.ones((1, size, size), dtype=torch.bool)
    return tensors
