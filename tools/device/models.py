"""Random models for the device programs, made in seconds where they are needed: a mixture of experts, and one with a head for speculation.

    make_dense_model(folder, ...)                                  Qwen3 of the 0.6B's shape: bytes to move and layers to train
    make_moe_model(folder, hidden_size=1024, num_layers=6, ...)    Qwen3-MoE: routing neither even nor fixed, logits that are not flat
    make_mtp_model(folder, hidden_size=1024, num_layers=12, ...)   MiMo: a Qwen2 with one multi-token-prediction layer that guesses right
                                                                   about as often as `agreement` says

Axes: V vocabulary, D hidden size.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")
HEAD_DIM = 64


def make_dense_model(
    folder: Path,
    *,
    hidden_size: int = 1024,
    num_layers: int = 28,
    ffn_size: int = 3072,
    vocab_size: int = 32768,
    tokenizer: Path | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """A random Qwen3 with the layers of the 0.6B when no size is given. tokenizer: as in make_moe_model."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=_vocab_size(tokenizer, vocab_size),
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=max(1, hidden_size // HEAD_DIM // 2),
        head_dim=2 * HEAD_DIM,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    model = _on_device(lambda: Qwen3ForCausalLM(config), seed)
    return _save(model.to(getattr(torch, dtype)), folder, tokenizer)


def make_moe_model(
    folder: Path,
    *,
    hidden_size: int = 1024,
    num_layers: int = 6,
    num_experts: int = 64,
    top_k: int = 8,
    expert_size: int = 512,
    vocab_size: int = 32768,
    tokenizer: Path | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """A random Qwen3-MoE. tokenizer: folder whose tokenizer it gets, and whose vocabulary's size. Nothing is done when it is there."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=_vocab_size(tokenizer, vocab_size),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        moe_intermediate_size=expert_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=max(1, hidden_size // HEAD_DIM // 4),
        head_dim=HEAD_DIM,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = _on_device(lambda: Qwen3MoeForCausalLM(config), seed)
    # The experts of a token are averaged, so each is made large: a layer then adds about half of what it got.
    _spread(model, logits_std=3.0, router_std=1.5, attention=1.0, feed_forward=3.0)
    return _save(model.to(getattr(torch, dtype)), folder, tokenizer)


def make_mtp_model(
    folder: Path,
    *,
    hidden_size: int = 1024,
    num_layers: int = 12,
    vocab_size: int = 32768,
    agreement: float = 0.8,
    tokenizer: Path | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """A MiMo with one multi-token-prediction layer, which vLLM runs with vllm.num_speculative_tokens and transformers loads as a Qwen2.

    Its language: each token has one likely successor, a permutation of the vocabulary, and any other token now and then. The model
    knows it from the last token's embedding, through layers that do the work of their size and change little; the draft head knows it
    from the same embedding. So a draft is accepted about as often as the likely successor is sampled: `agreement` at temperature 1,
    less where the layers' noise is large. tokenizer: as in make_moe_model.
    """
    if (folder / "config.json").is_file():
        return folder
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=_vocab_size(tokenizer, vocab_size),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=max(1, hidden_size // HEAD_DIM // 4),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = _on_device(lambda: Qwen2ForCausalLM(config), seed)
    _spread(model, logits_std=1.0, attention=0.3 / math.sqrt(num_layers), feed_forward=0.3 / math.sqrt(num_layers))
    _teach_successors(model, agreement, seed)
    _save(model.to(getattr(torch, dtype)), folder, tokenizer)
    _add_draft_head(folder, config, model)
    return folder


def _vocab_size(tokenizer: Path | None, otherwise: int) -> int:
    return otherwise if tokenizer is None else int(json.loads((tokenizer / "config.json").read_text())["vocab_size"])


def _on_device(make: Any, seed: int) -> Any:
    """On the GPU, where there is one."""
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return make()


@torch.no_grad()
def _spread(model: torch.nn.Module, *, logits_std: float, attention: float, feed_forward: float, router_std: float = 1.0) -> None:
    """Random weights under which a normed hidden state gives logits of these deviations; scales of what a layer's halves add to it."""
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        std = weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            std = 1.0
        elif "lm_head" in name:
            std *= logits_std
        elif name.endswith("mlp.gate.weight"):
            std *= router_std
        elif "o_proj" in name:
            std *= attention
        elif "down_proj" in name:
            std *= feed_forward
        weight.normal_(0.0, std)


@torch.no_grad()
def _teach_successors(model: Any, agreement: float, seed: int) -> None:
    """Give the head the embeddings of predecessors: after token v, token successor(v) has probability `agreement`, the rest is noise."""
    embedding_VD = model.get_input_embeddings().weight
    num, size = embedding_VD.shape
    order_V = torch.randperm(num, generator=torch.Generator().manual_seed(seed + 1)).to(embedding_VD.device)
    predecessor_V = torch.empty_like(order_V)
    predecessor_V[order_V] = torch.roll(order_V, 1)  # one cycle through the whole vocabulary
    # The right logit is s; V others have variance s^2 / D, so their exponentials sum to V exp(s^2 / 2D): solve s - s^2/2D = ln V + logit.
    wanted = math.log(num) + math.log(agreement / (1 - agreement))
    logit = size * (1 - math.sqrt(max(0.0, 1 - 2 * wanted / size)))
    model.get_output_embeddings().weight.copy_(embedding_VD[predecessor_V] * (logit / size))


def _add_draft_head(folder: Path, config: Any, model: Any) -> None:
    """Add the weights of a MiMo draft layer, which passes the embedding of the last token through, and say so in config.json."""
    from safetensors.torch import save_file

    size, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(7)

    def small(*shape: int, share: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * share * shape[-1] ** -0.5).to(dtype)

    prefix = "model.mtp_layers.0."
    tensors = {
        "token_layernorm.weight": torch.ones(size),
        "hidden_layernorm.weight": torch.ones(size),
        "final_layernorm.weight": torch.ones(size),
        "input_layernorm.weight": torch.ones(size),
        "post_attention_layernorm.weight": torch.ones(size),
        "input_proj.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1),  # of [hidden state, embedding]
        "self_attn.q_proj.weight": small(heads * HEAD_DIM, size),
        "self_attn.q_proj.bias": torch.zeros(heads * HEAD_DIM),
        "self_attn.k_proj.weight": small(groups * HEAD_DIM, size),
        "self_attn.k_proj.bias": torch.zeros(groups * HEAD_DIM),
        "self_attn.v_proj.weight": small(groups * HEAD_DIM, size),
        "self_attn.v_proj.bias": torch.zeros(groups * HEAD_DIM),
        "self_attn.o_proj.weight": small(size, heads * HEAD_DIM, share=0.1),
        "mlp.gate_proj.weight": small(config.intermediate_size, size),
        "mlp.up_proj.weight": small(config.intermediate_size, size),
        "mlp.down_proj.weight": small(size, config.intermediate_size, share=0.1),
    }
    save_file({prefix + name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model-mtp.safetensors", {"format": "pt"})
    (folder / "model.safetensors").rename(folder / "model-base.safetensors")
    _write_index(folder)
    file = folder / "config.json"
    told = json.loads(file.read_text()) | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(told, indent=2))


def _write_index(folder: Path) -> None:
    """The list of which tensor is in which file."""
    from safetensors import safe_open

    places, size = {}, 0
    for file in sorted(folder.glob("*.safetensors")):
        size += file.stat().st_size
        with safe_open(file, framework="pt") as stored:
            places |= dict.fromkeys(stored.keys(), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))


def _save(model: Any, folder: Path, tokenizer: Path | None) -> Path:
    model.save_pretrained(str(folder), max_shard_size="40GB")
    if torch.cuda.is_available():
        model.to("meta")
        torch.cuda.empty_cache()  # the card is for what is measured
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    return folder
