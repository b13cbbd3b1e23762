"""The parameters of a model from its config.json alone: built on the meta device, so that neither weights nor memory are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from molt.errors import SettingError


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
    )
