"""The demo's own world, made offline: a tiny tokenizer, a tiny Qwen3-shaped model, sums to do and conversations to warm up on.

The task: `37+58` must be answered with its sum. The model is too small to add, so the right policy writes
`<calc>37+58</calc>`, reads the tool's answer and copies it. The warm-up conversations show right and wrong ways.

Settings that were tried (plain torch, one thread): 4,000 conversations, supervised steps of 64 at learning rate 3e-3 (20 steps
of warm-up, then linear to a tenth; 500 steps take 18 s) give a policy that is right in 0.25-0.45 of its rollouts. Then GRPO with
8 groups of 8 at temperature 1; gradient norm clipped at 1, no weight decay, betas (0.9, 0.95). Mean reward of the first and last ten steps:

    supervised steps   learning rate   steps   first ten   last ten
    600                3e-4            40      0.46        0.92
    500 (other seed)   3e-4            40      0.46        0.88
    500                2e-4            60      0.40        0.88
    400                3e-4            50      0.50        0.88

A rollout has about 25 tokens in at most 4 calls of at most 16 tokens; data.max_len=96 is ample.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
END = "<|end|>"
SPECIAL = ("<|pad|>", END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
WORDS = ("<calc>", "</calc>")
"""Whole tokens that are ordinary text to the agent."""


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges: 256 bytes, the special tokens and the tool's two words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*SPECIAL, *WORDS, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token="<|pad|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(str(folder))


def make_model(folder: Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 2) -> None:
    """Write a freshly initialised Qwen3-shaped model and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(WORDS) + 256,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=0,
        bos_token_id=None,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = Qwen3ForCausalLM(config)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(str(folder))


def make_prompts(file: Path, *, num_prompts: int, seed: int = 0) -> None:
    """Write sums of two numbers of one or two digits: {"input": "37+58", "label": "95"}."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_prompts):
        first, second = rng.randint(1, 99), rng.randint(1, 99)
        rows.append({"input": f"{first}+{second}", "label": str(first + second)})
    _write(file, rows)


def make_warmup(file: Path, *, num_conversations: int, seed: int = 1) -> None:
    """Write conversations of which about a third end right; each way to go wrong is one that reinforcement can unlearn."""
    rng = random.Random(seed)
    rows = [{"messages": _conversation(rng)} for _ in range(num_conversations)]
    _write(file, rows)


def _conversation(rng: random.Random) -> list[dict[str, Any]]:
    first, second = rng.randint(1, 99), rng.randint(1, 99)
    question = {"role": "user", "content": f"{first}+{second}"}
    way = rng.random()
    if way < 0.5:
        return [question, {"role": "assistant", "content": str(rng.randint(2, 198))}]
    if way < 0.6:
        return [question, {"role": "assistant", "content": f"{first}+{second}"}]
    called = [question, {"role": "assistant", "content": f"<calc>{first}+{second}</calc>"}]
    called.append({"role": "tool", "content": str(first + second)})
    answer = first + second if way < 0.95 else rng.randint(2, 198)
    return [*called, {"role": "assistant", "content": str(answer)}]


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
