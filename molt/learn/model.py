"""The one model seam: a causal language model that turns packed rows into log-probs of their sampled tokens.

Axes: L packed tokens, N sampled tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from molt.config import ActorSettings, FsdpSettings
from molt.errors import LineageError, SettingError
from molt.learn import attention, automodel, streamed
from molt.learn.context import Cut, cut
from molt.learn.logprob import head_logprobs, logits_logprobs
from molt.learn.mesh import RankMesh
from molt.learn.packing import Packed, RowImages
from molt.learn.routes import Routes
from molt.learn.tensor_parallel import local_head
from molt.model_shape import IMAGE_FAMILIES, takes_images
from molt.rollout.vision import blank_tensors, eyes, features_per_tile, has_eyes, image_features, language_model, model_class

PACKED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of layers, as configs call them, that look at the tokens of a row only where the attention says so."""
STATEFUL_FAMILIES = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
        "nemotron_h", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip
"""Models with a state that goes from token to token, whatever their configs call the layers."""


class TokenScorer(nn.Module):
    """A causal language model whose forward gives log-prob and entropy of each sampled token of packed rows."""

    lm: Any
    """The Hugging Face model."""

    def __init__(self, lm: Any, *, attention_name: str) -> None:
        super().__init__()
        self.lm = lm
        self.attention_name = attention_name
        # By name, so that a driver which only knows of ranks does not import transformers.
        self.takes_cache = any(base.__name__ == "PreTrainedModel" for base in type(lm).__mro__)
        self.mesh: RankMesh | None = None
        """How the model is spread, once it is."""
        self.routes: Routes | None = None
        """Routing replay, where it is on."""
        self.source: Path | None = None
        """Folder whose weights the model waits for until it is sharded; None once it has them."""
        head = lm.get_output_embeddings()
        self.has_plain_head = isinstance(head, nn.Linear) and not _scales_logits(lm.config)
        self.inner_head = InnerHead(head) if self.has_plain_head and isinstance(lm, FSDPModule) else None
        self.has_eyes = has_eyes(lm)
        """Whether it takes images."""

    def forward(self, packed: Packed, wants_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) log-probs and (N,) entropies, nats, float32; the entropies are zeros unless wanted."""
        part = self.cut(packed)
        if part is None:
            return self._own(packed, None, wants_entropy)
        logprobs_n, entropy_n = self._own(part.packed, part, wants_entropy)
        logprobs_N = part.gather(logprobs_n)
        return logprobs_N, part.gather(entropy_n) if wants_entropy else torch.zeros_like(logprobs_N)

    def cut(self, packed: Packed) -> Cut | None:
        """The slice of this rank under context parallelism; None without it."""
        return None if self.mesh is None or self.mesh.cp is None else cut(packed, self.mesh.cp)

    def _own(self, packed: Packed, part: Cut | None, wants_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the tokens that this rank computes."""
        inputs = self.inputs(packed, part)
        if self.routes is not None:
            self.routes.lay(packed.routes_LMK, n_padding=packed.n_padding)
        if self.inner_head is not None:
            with self.inner_head.scores(packed, wants_entropy) as found:
                logprobs_N = self.lm(**inputs, logits_to_keep=packed.index_N).logits
            return logprobs_N, found[0]
        if not self.has_plain_head:
            logits_NV = self.lm(**inputs, logits_to_keep=packed.index_N).logits.flatten(0, -2)
            return logits_logprobs(logits_NV, packed.target_N, packed.temperature_N)
        hidden_ND = self.hidden(inputs)[packed.index_N]
        tp = None if self.mesh is None else self.mesh.tp
        weight, bias = local_head(self.lm.get_output_embeddings(), tp)
        group = None if tp is None else tp.get_group()
        return head_logprobs(hidden_ND, weight, bias, packed.target_N, packed.temperature_N, wants_entropy=wants_entropy, group=group)

    def hidden(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Last hidden states of packed rows. # (L, D)"""
        body = self.lm.base_model if hasattr(self.lm, "base_model") else self.lm.model
        output = body(**inputs)
        hidden = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])

    def inputs(self, packed: Packed, part: Cut | None = None) -> dict[str, Any]:
        """Arguments of the language model for packed rows, or for a slice of them."""
        if (bounds := getattr(self.lm, "row_bounds", None)) is not None:
            bounds.row_lengths, bounds.slice_of = packed.row_lengths, None if part is None else part.own
        inputs: dict[str, Any] = {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
        if self.takes_cache:
            inputs["use_cache"] = False
        if self.has_eyes:
            inputs["inputs_embeds"] = self._embeddings(packed)
            del inputs["input_ids"]
        return inputs | self._attention_inputs(packed, part)

    def check_images(self, images: RowImages, where: str) -> None:
        """LineageError for images that this model cannot take, or whose features are not as many as their tokens."""
        if not self.has_eyes:
            raise LineageError(f"{where}: it has images, and the model takes none")
        for num_tokens, tensors in zip(images.counts, images.tensors, strict=True):
            num_tiles = len(next(iter(tensors.values()), ()))
            num_features = num_tiles * features_per_tile(self.lm)
            if num_tokens != num_features:
                raise LineageError(
                    f"{where}: {num_tokens} image tokens, and the trainer makes {num_features} features of its {num_tiles} tiles; "
                    "engine and trainer disagree about images"
                )

    def _embeddings(self, packed: Packed) -> torch.Tensor:
        """(1, L, D): embeddings of the ids, features of images in their places. Where the tower learns, a pass without images looks at a
        blank tile, so that every rank has the same gradients."""
        embeds_LD = self.lm.get_input_embeddings()(packed.input_ids)[0]
        is_learning = torch.is_grad_enabled() and any(p.requires_grad for module in eyes(self.lm) for p in module.parameters())
        if packed.feature_F is None and not is_learning:
            return embeds_LD[None]
        tensors = {name: tensor.to(embeds_LD.device) for name, tensor in (packed.image_tensors or blank_tensors(self.lm)).items()}
        with torch.set_grad_enabled(is_learning):
            features_FD = image_features(self.lm, tensors).to(embeds_LD.dtype)
        if packed.feature_F is None or packed.source_F is None:
            return (embeds_LD + 0.0 * features_FD.sum())[None]
        return embeds_LD.index_copy(0, packed.feature_F, features_FD[packed.source_F])[None]

    def _attention_inputs(self, packed: Packed, part: Cut | None) -> dict[str, Any]:
        """What the attention needs to keep rows apart."""
        if self.attention_name in (attention.NAME, attention.FLEX):
            return {"row_lengths": packed.row_lengths, **({} if part is None else {"slice_of": part.own})}
        if self.attention_name == "eager":
            return {"attention_mask": attention.block_causal_mask(packed.row_lengths, packed.input_ids.device, self.dtype)}
        bounds = torch.tensor((0, *packed.row_lengths), dtype=torch.int32, device=packed.input_ids.device).cumsum(0, dtype=torch.int32)
        longest = max(packed.row_lengths)
        if self.attention_name == "te":
            automodel.check_te_memory(packed.row_lengths, self.lm.config)
            ids, places = packed.input_ids[0], packed.position_ids[0]
            return {"input_ids": ids, "position_ids": places, "qkv_format": "thd", "cu_seqlens": bounds, "max_seqlen": longest}
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the layers compute in, for masks."""
        return next(self.lm.parameters()).dtype


class InnerHead:
    """The output head of a model that came sharded. Its weight is whole in its own forward pass only, so log-probs are computed there,
    in place of logits, which would be whole too."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.packed: Packed | None = None
        self.wants_entropy = False
        self.entropy: list[torch.Tensor] = []
        head.forward = self.forward  # type: ignore[method-assign, assignment]

    @contextmanager
    def scores(self, packed: Packed, wants_entropy: bool) -> Iterator[list[torch.Tensor]]:
        """What the next forward pass predicts; the list then holds its entropies."""
        self.packed, self.wants_entropy, self.entropy = packed, wants_entropy, []
        try:
            yield self.entropy
        finally:
            self.packed = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N,) log-probs."""
        packed = self.packed
        assert packed is not None, "a sharded head is asked through molt.learn.model"
        hidden_ND = hidden.reshape(-1, hidden.shape[-1])
        weight, bias = self.head.weight, self.head.bias
        logprobs_N, entropy_N = head_logprobs(
            hidden_ND, weight, bias, packed.target_N, packed.temperature_N, wants_entropy=self.wants_entropy
        )
        self.entropy.append(entropy_N)
        return logprobs_N


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
        part = self.scorer.cut(packed)
        own = packed if part is None else part.packed
        hidden_ND = self.scorer.hidden(self.scorer.inputs(own, part))[own.index_N]
        values_N = self.value_head(hidden_ND).float().sum(1)  # FSDP hangs its backward hook on what returns, which must not be a view
        values_N = values_N if part is None else part.gather(values_N)
        return values_N, torch.zeros_like(values_N)


def load_model(path: str, actor: ActorSettings, fsdp: FsdpSettings, *, is_deferred: bool = False) -> TokenScorer:
    """The policy in float32 master weights, on the CPU, dropout off. Raises SettingError for what cannot be loaded.

    is_deferred: leave the weights in their files until molt.learn.policy.shard, where each rank reads its own part; as far as the class
    of the model and the files allow it.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    if not (Path(path) / "config.json").is_file():
        raise SettingError(f"actor.model_name_or_path={path}, it holds no config.json; give a folder with a Hugging Face model")
    if uses_automodel(actor, fsdp) and not takes_images(path):
        lm, name = automodel.load_automodel(path, actor, fsdp)
        refuse_layers(path, lm.config, name)
        prepare(lm, actor)
        return TokenScorer(lm, attention_name=name)
    name = attention_name(fsdp)
    attention.register()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        refuse_layers(path, config, name)
        has_images = config.model_type in IMAGE_FAMILIES
        # Rows are kept apart among tokens; the tiles of an image are a batch of their own.
        attention_of: Any = {"text_config": name, "vision_config": "sdpa"} if has_images else name
        empty = streamed.empty_model(Path(path), attention=attention_of) if is_deferred else None
        lm = empty
        if lm is None:
            lm = model_class(config).from_pretrained(path, dtype=torch.float32, attn_implementation=attention_of, local_files_only=True)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SettingError(f"actor.model_name_or_path={path}, the model does not load: {error}") from error
    prepare(lm, actor)
    if actor.moe_router_dtype == "float32":
        Routes.install(lm, setting="actor.moe_router_dtype=float32")  # our forward of a router computes in its own dtype
    scorer = TokenScorer(lm, attention_name=name)
    scorer.source = None if empty is None else Path(path)
    return scorer


def uses_automodel(actor: ActorSettings, fsdp: FsdpSettings) -> bool:
    """Whether NeMo AutoModel makes the policy: where it is asked for, and by itself on a GPU that has it, without tensor parallelism."""
    if actor.implementation == "auto":
        return fsdp.ep_size > 1 or (fsdp.tp_size == 1 and torch.cuda.is_available() and automodel.is_installed())
    return actor.implementation == "automodel"


def refuse_layers(path: str, config: Any, name: str) -> None:
    """SettingError for layers that would see other rows of a packed batch, or other tokens than elsewhere. name: of the attention."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    others = sorted(kinds - PACKED_LAYERS)
    if others or text.model_type in STATEFUL_FAMILIES:
        raise SettingError(
            f"actor.model_name_or_path={path}, its layers ({', '.join(others) or text.model_type}) look beyond the tokens of their own row "
            "of a packed batch, or at fewer of them, in a way that packing does not know; take a model whose layers are of kind "
            f"{', '.join(sorted(PACKED_LAYERS))}"
        )
    if name == "eager" and "sliding_attention" in kinds:
        raise SettingError(
            f"fsdp.attn_implementation=eager, {path} has layers that see a window, which its one mask for all layers does not have; "
            "set it to sdpa"
        )


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
    if has_eyes(lm) and actor.freeze_vision:
        for module in eyes(lm):
            module.requires_grad_(False)
    if actor.gradient_checkpointing:
        checkpoint_blocks(lm)


def checkpoint_blocks(lm: nn.Module) -> None:
    """Keep only the inputs of each layer and compute the rest again in the backward pass."""
    for block in [*decoder_blocks(lm), *(block for tower in (eyes(lm)[:1] if has_eyes(lm) else []) for block in decoder_blocks(tower))]:
        block.forward = _checkpointed(block.forward)


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
    names = {"sdpa": attention.NAME, "eager": "eager", "flash_attention_2": "flash_attention_2", "flex": attention.FLEX}
    if fsdp.attn_implementation not in names:
        raise SettingError(
            f"fsdp.attn_implementation={fsdp.attn_implementation}, the Hugging Face model has no such attention for packed rows; "
            f"set it to {', '.join(names)}, or actor.implementation to automodel"
        )
    return names[fsdp.attn_implementation]


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, outermost only, in order: the units that are sharded. Of a model that takes images, those of its language model:
    how often a rank runs its vision tower depends on the images that it has, so no unit of it may be gathered by itself."""
    lm: Any = getattr(model, "lm", model)
    if has_eyes(lm):
        return decoder_blocks(language_model(lm))
    stacks = [list(m.values()) for m in model.modules() if isinstance(m, nn.ModuleDict) and _is_stack(list(m.values()))]
    stacks += [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and _is_stack(list(m))]
    sizes = [sum(p.numel() for block in blocks for p in block.parameters()) for blocks in stacks]
    return stacks[sizes.index(max(sizes))] if stacks else []


def _is_stack(blocks: list[nn.Module]) -> bool:
    """Whether modules are the layers of a model: all of one class, and more than bare parameters."""
    return len(blocks) > 0 and len({type(block) for block in blocks}) == 1


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer under activation checkpointing."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run


def _scales_logits(config: Any) -> bool:
    """Whether the model does more than a linear map to make logits."""
    return any(getattr(config, key, None) is not None for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"))
