"""The one model seam: a causal language model that turns packed rows into log-probs of their sampled tokens.

Axes: L packed tokens, N sampled tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from molt.config import ActorSettings, FsdpSettings
from molt.errors import SettingError
from molt.learn import attention
from molt.learn.logprob import head_logprobs, logits_logprobs
from molt.learn.packing import Packed
from molt.learn.routes import Routes


class TokenScorer(nn.Module):
    """A causal language model whose forward gives log-prob and entropy of each sampled token of packed rows."""

    lm: Any
    """The Hugging Face model."""

    def __init__(self, lm: Any, *, attention_name: str) -> None:
        super().__init__()
        self.lm = lm
        self.attention_name = attention_name
        self.routes: Routes | None = None
        """Routing replay, where it is on."""
        head = lm.get_output_embeddings()
        self.has_plain_head = isinstance(head, nn.Linear) and not _scales_logits(lm.config)

    def forward(self, packed: Packed, wants_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) log-probs and (N,) entropies, nats, float32; the entropies are zeros unless wanted."""
        inputs = self.inputs(packed)
        if self.routes is not None:
            self.routes.lay(packed.routes_LMK)
        if not self.has_plain_head:
            logits_NV = self.lm(**inputs, logits_to_keep=packed.index_N).logits[0]
            return logits_logprobs(logits_NV, packed.target_N, packed.temperature_N)
        hidden_ND = self.lm.base_model(**inputs).last_hidden_state[0][packed.index_N]
        head = self.lm.get_output_embeddings()
        return head_logprobs(hidden_ND, head.weight, head.bias, packed.target_N, packed.temperature_N, wants_entropy=wants_entropy)

    def inputs(self, packed: Packed) -> dict[str, Any]:
        """Arguments of the language model for packed rows."""
        return {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "use_cache": False} | self._attention_inputs(packed)

    def _attention_inputs(self, packed: Packed) -> dict[str, Any]:
        """What the attention needs to keep rows apart."""
        if self.attention_name == attention.NAME:
            return {"row_lengths": packed.row_lengths}
        if self.attention_name == "eager":
            return {"attention_mask": attention.block_causal_mask(packed.row_lengths, packed.input_ids.device, self.dtype)}
        bounds = torch.tensor((0, *packed.row_lengths), dtype=torch.int32, device=packed.input_ids.device).cumsum(0, dtype=torch.int32)
        longest = max(packed.row_lengths)
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the layers compute in, for masks."""
        return next(self.lm.parameters()).dtype


class TokenValuer(nn.Module):
    """A value for the state before each sampled token: the body of a language model and one linear map, in place of its head."""

    def __init__(self, scorer: TokenScorer, *, head: dict[str, torch.Tensor] | None = None) -> None:
        """head: saved weights of the value head; zeros otherwise, so that every value begins at 0."""
        super().__init__()
        self.scorer = scorer
        scorer.lm.set_output_embeddings(nn.Identity())
        self.value_head = nn.Linear(scorer.lm.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if head is not None:
            self.value_head.load_state_dict(head)

    def forward(self, packed: Packed, wants_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) values and (N,) zeros, float32."""
        hidden_ND = self.scorer.lm.base_model(**self.scorer.inputs(packed)).last_hidden_state[0][packed.index_N]
        values_N = self.value_head(hidden_ND)[:, 0].float()
        return values_N, torch.zeros_like(values_N)


def load_model(path: str, actor: ActorSettings, fsdp: FsdpSettings) -> TokenScorer:
    """The policy in float32 master weights, on the CPU, dropout off. Raises SettingError for what cannot be loaded."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    if not (Path(path) / "config.json").is_file():
        raise SettingError(f"actor.model_name_or_path={path}, it holds no config.json; give a folder with a Hugging Face model")
    name = attention_name(fsdp)
    attention.register()
    try:
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SettingError(f"actor.model_name_or_path={path}, the model does not load: {error}") from error
    prepare(lm, actor)
    return TokenScorer(lm, attention_name=name)


def prepare(lm: Any, actor: ActorSettings) -> None:
    """Turn dropout off (the engine has none), freeze what is to stay, and set activation checkpointing."""
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    if actor.freeze_moe_router:
        freeze_router(lm)
    if actor.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def freeze_router(lm: nn.Module) -> None:
    """Keep the routers of a mixture of experts as they are. Raises SettingError when there is none."""
    routers = [
        p for name, p in lm.named_parameters() if name.endswith((".mlp.gate.weight", ".router.weight", ".gate.e_score_correction_bias"))
    ]
    if not routers:
        raise SettingError("actor.freeze_moe_router=true, the model has no router; set it to false")
    for parameter in routers:
        parameter.requires_grad_(False)


def attention_name(fsdp: FsdpSettings) -> str:
    """Name under which transformers finds the attention. Raises SettingError for one that this seam has not."""
    names = {"sdpa": attention.NAME, "eager": "eager", "flash_attention_2": "flash_attention_2"}
    if fsdp.attn_implementation not in names:
        raise SettingError(
            f"fsdp.attn_implementation={fsdp.attn_implementation}, the Hugging Face model has no such attention for packed rows; "
            f"set it to {', '.join(names)}, or actor.implementation to automodel"
        )
    return names[fsdp.attn_implementation]


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, outermost only, in order: the units that are sharded."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    sizes = [sum(p.numel() for p in blocks.parameters()) for blocks in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _scales_logits(config: Any) -> bool:
    """Whether the model does more than a linear map to make logits."""
    return any(getattr(config, key, None) is not None for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"))
