"""Tokenizers for tests: bytes, plus the special tokens that a template speaks of."""

from __future__ import annotations

import re

from molt.agents.tokenizer import Tokenizer

MARKERS = re.compile(r"<\|[\w .-]+\|>|<｜[^｜<>]+｜>|</?[a-z_]*turn[a-z_]*>|\[/?(?:INST|EOS|SEP)\]|</s>|<s>|<end_of_utterance>|<\|\w+>|<\w+\|>")


def byte_tokenizer(template: str, *, merges: tuple[tuple[str, str], ...] = (), bos: str | None = None, eos: str | None = None, ends: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE whose special tokens are those of the template."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner
    from transformers import PreTrainedTokenizerFast

    special = sorted({*MARKERS.findall(template), bos or "<bos>", eos or "<eos>"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*special, *alphabet, *("".join(pair) for pair in merges)]
    inner = Inner(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos or "<bos>", eos_token=eos or "<eos>", chat_template=template)
    end_ids = [special.index(text) for text in ends]
    return Tokenizer(fast, name="byte tokenizer", digest="0" * 32, end_ids=end_ids)
