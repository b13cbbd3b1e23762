"""Tokenizers for tests: bytes, plus the special tokens that a template speaks of."""

from __future__ import annotations

import re

from molt.agents.tokenizer import Tokenizer

MARKERS = re.compile(
    r"<\|[\w .-]+\|>|<\|\w+>|<\w+\|>|<｜[^｜<>]+｜>|</?[a-z_]*turn[a-z_]*>|\[/?(?:INST|EOS|SEP)\]|</s>|<s>|<end_of_utterance>"
)


def byte_tokenizer(
    template: str,
    *,
    merges: tuple[tuple[str, str], ...] = (),
    bos: str = "<bos>",
    eos: str = "<eos>",
    ends: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
) -> Tokenizer:
    """A byte-level BPE whose special tokens are those of the template. ends: further tokens that end a generation."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner
    from transformers import PreTrainedTokenizerFast

    names = sorted({*MARKERS.findall(template), bos, eos, *special})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*names, *alphabet, *("".join(pair) for pair in merges)]
    inner = Inner(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos, chat_template=template)
    return Tokenizer(fast, name="byte tokenizer", digest="0" * 32, end_ids=[names.index(text) for text in ends])
