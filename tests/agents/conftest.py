"""Fixtures of the agents' tests: the tiny tokenizer, its renderer, and one prompt."""

from __future__ import annotations

import pytest

from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.data.prompts import Prompt
from molt.data.tiny import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo's tokenizer: bytes and a few special tokens, <|end|> ends a turn."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    """The demo's template: <|role|>content<|end|>."""
    return ChatRenderer(tokenizer)


@pytest.fixture
def prompt() -> Prompt:
    """One sum."""
    return Prompt(prompt_id="p", prompt_index=0, messages=({"role": "user", "content": "37+58"},), label="95")
