"""The prompts that parity is measured on: texts of several kinds, or ids alone for a model without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from molt.agents.tokenizer import TOKENIZER_FILES, Tokenizer
from molt.config import Config
from molt.data.prompts import PromptSet
from molt.errors import SettingError

TEXTS = (
    "What is 47 * 89? Think step by step, then give the number alone on the last line.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Prove that the sum of two odd numbers is even.",
    "def quicksort(values: list[int]) -> list[int]:\n    ",
    "SELECT customer_id, count(*) FROM orders WHERE",
    '{"name": "search", "arguments": {"query": "weather in Oslo", "limit": 3',
    "<html>\n  <body>\n    <table class='results'>",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "The three laws of thermodynamics can be summarised as follows:\n1.",
    "Translate into French: The library closes at six, but the reading room stays open until midnight.",
    "Schreibe einen kurzen Brief an deine Nachbarin und bitte sie, die Blumen zu gießen.",
    "请用三句话解释什么是光合作用。",
    "Объясни, почему небо голубое.",
    "a a a a a a a a a a a a a a a a",
    "3.14159265358979323846264338327950288419716939937510",
    "List the prime numbers below one hundred.\n\n2, 3, 5, 7, 11,",
)
NUM_IDS = (24, 32, 40, 48, 56, 64, 72, 80)
"""Lengths of prompts made of ids."""


def prompt_ids(config: Config, *, file: Path | None, vocab_size: int) -> list[list[int]]:
    """Ids of each prompt: those of a file in the form of data.prompt_dataset, or the fixed ones; cut to leave room for the answer."""
    folder = Path(str(config.actor.model_name_or_path))
    room = config.data.max_len - config.rollout.max_new_tokens
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = Tokenizer.load(folder)
        texts = TEXTS if file is None else _texts(file, config)
        found = [tokenizer.encode(text).tolist() for text in texts]
    elif file is not None:
        raise SettingError(f"--prompts {file}, the model folder holds no tokenizer to read them with; leave it out for fixed ids")
    else:
        generator = np.random.default_rng(0)
        found = [generator.integers(0, vocab_size, length).tolist() for length in NUM_IDS]
    return [ids[:room] for ids in found if ids]


def _texts(file: Path, config: Config) -> list[str]:
    """Messages of each prompt as plain text, one after another."""
    prompts = PromptSet.load(file, config.data, setting="--prompts")
    return ["\n".join(str(message["content"]) for message in prompt.messages) for prompt in prompts]
