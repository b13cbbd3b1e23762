"""The shape of a model, read from its config.json alone: what rules and the dry-run need before anything heavy is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.errors import SettingError

IMAGE_FAMILIES = ("idefics3", "llava")
"""Models whose images Molt carries, by model_type: SmolVLM and Idefics 3, LLaVA. Their positions are those of text."""
REFUSED_FAMILIES = {
    "qwen2_vl": "its tokens have positions of three axes, which packed rows do not carry yet",
    "qwen2_5_vl": "its tokens have positions of three axes, which packed rows do not carry yet",
    "qwen3_vl": "its tokens have positions of three axes, which packed rows do not carry yet",
    "gemma3": "the tokens of its images attend to each other both ways, which packed rows do not do",
    "mllama": "it reads images through layers of its own beside the tokens",
}
"""Why not others."""


def model_type(folder: str | Path) -> str:
    """What the config.json of a folder calls its model; empty without one."""
    try:
        return str(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError):
        return ""


def takes_images(folder: str | Path) -> bool:
    """Whether a model is one whose images Molt carries."""
    return model_type(folder) in IMAGE_FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; those of a dense model have no experts."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Hidden columns of a dense feed-forward layer."""
    vocab_size: int
    num_experts: int
    """In a layer with experts; 0 without."""
    num_experts_per_token: int
    expert_size: int
    """Hidden columns of one expert; 0 without."""
    max_positions: int
    num_draft_layers: int
    """Multi-token-prediction layers, which an engine can draft with; 0 without."""
    is_tied: bool
    """Whether embedding and output head are one tensor."""
    has_eyes: bool = False
    """Whether it takes images, and Molt carries them."""

    @classmethod
    def read(cls, folder: str | Path) -> ModelShape:
        """From a folder that holds a config.json. Raises SettingError for one without, or without sizes."""
        file = Path(folder) / "config.json"
        try:
            whole = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"actor.model_name_or_path={folder}, its config.json cannot be read: {error}") from error
        text = whole.get("text_config") or whole
        missing = [name for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") if name not in text]
        if missing:
            raise SettingError(f"actor.model_name_or_path={folder}, its config.json lacks {', '.join(missing)}; give a decoder's folder")
        is_tied = bool(text.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)))
        return cls._of(text, is_tied=is_tied, has_eyes=whole.get("model_type") in IMAGE_FAMILIES)

    @classmethod
    def _of(cls, text: dict[str, Any], *, is_tied: bool, has_eyes: bool) -> ModelShape:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        experts = _first(text, "num_experts", "n_routed_experts", "num_local_experts")
        return cls(
            model_type=str(text.get("model_type", "unknown")),
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_first(text, "num_key_value_heads") or heads,
            head_dim=_first(text, "head_dim") or hidden // heads,
            intermediate_size=_first(text, "intermediate_size"),
            vocab_size=int(text["vocab_size"]),
            num_experts=experts,
            num_experts_per_token=_first(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk") if experts else 0,
            expert_size=(_first(text, "moe_intermediate_size") or _first(text, "intermediate_size")) if experts else 0,
            max_positions=_first(text, "max_position_embeddings"),
            num_draft_layers=_first(text, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
            is_tied=is_tied,
            has_eyes=has_eyes,
        )


def _first(text: dict[str, Any], *names: str) -> int:
    """The first of these that is given, 0 for none."""
    return next((int(text[name]) for name in names if text.get(name)), 0)
