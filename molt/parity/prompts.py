"""The prompts that parity is measured on: texts of several kinds, or ids alone for a model without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from molt.agents.env import AgentRunner
from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import TOKENIZER_FILES, Tokenizer
from molt.config import Config
from molt.data.images import Image
from molt.data.messages import texts_of
from molt.data.processor import ImageProcessor, PlacedImage, contract
from molt.data.prompts import Prompt, PromptSet
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
PICTURES = ((64, 64), (96, 48), (300, 200), (512, 512))
"""Sizes of the pictures that a model which takes images is shown."""
NUM_IDS = (24, 32, 40, 48, 56, 64, 72, 80)
"""Lengths of prompts made of ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt."""

    sent: list[int]
    """As the engine is sent it: one placeholder an image."""
    token_ids: np.ndarray
    """(P,) int32: as the model consumes it."""
    images: tuple[PlacedImage, ...] = ()


def asked(config: Config, *, file: Path | None, vocab_size: int) -> list[Asked]:
    """Those of a file in the form of data.prompt_dataset, or the fixed ones, pictures among them for a model that takes images."""
    model = Path(str(config.actor.model_name_or_path))
    texts = prompt_ids(config, file=file, vocab_size=vocab_size)
    found = [Asked(sent=ids, token_ids=np.array(ids, np.int32)) for ids in texts]
    processor = ImageProcessor.load(model)
    if processor is None:
        return found
    if file is not None:
        return [item for prompt in PromptSet.load(file, config.data, setting="--prompts") for item in _rendered(prompt, config, processor)]
    question = Tokenizer.load(model).encode(" How many circles are in the picture?").tolist()
    sent = [[processor.placeholder_id, *question], [*question, processor.placeholder_id, *question, processor.placeholder_id]]
    for number, size in enumerate(PICTURES):
        ids = sent[number % 2]
        shown = [picture(number + offset, size) for offset in range(ids.count(processor.placeholder_id))]
        whole, placed = processor.expand(np.array(ids, np.int32), shown)
        found += [Asked(sent=ids, token_ids=whole, images=placed)] if len(whole) <= _room(config) else []
    return found


def picture(number: int, size: tuple[int, int]) -> Image:
    """Waves of colour, others for each number."""
    import PIL.Image

    across, down = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    waves = [np.sin(across / (5 + number + colour)) + np.cos(down / (9 + 2 * number + colour)) for colour in range(3)]
    return Image.of(PIL.Image.fromarray((63 * (2 + np.stack(waves, axis=-1))).astype(np.uint8)))


def _rendered(prompt: Prompt, config: Config, processor: ImageProcessor) -> list[Asked]:
    """A prompt of a file with its images, by the model's template; nothing where it leaves no room."""
    renderer = ChatRenderer.for_agent(Tokenizer.load(str(config.actor.model_name_or_path)), AgentRunner, config.data)
    (gap,) = renderer.layout(prompt.messages, {}).gaps
    if len(gap.token_ids) > _room(config):
        return []
    sent = contract(gap.token_ids, gap.images, processor.placeholder_id).tolist()
    return [Asked(sent=sent, token_ids=gap.token_ids, images=gap.images)]


def _room(config: Config) -> int:
    """Tokens that a prompt may have."""
    return config.data.max_len - config.rollout.max_new_tokens


def prompt_ids(config: Config, *, file: Path | None, vocab_size: int) -> list[list[int]]:
    """Ids of each prompt's text: those of a file, or the fixed ones; cut to leave room for the answer."""
    folder = Path(str(config.actor.model_name_or_path))
    room = _room(config)
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
    return ["\n".join(text for message in prompt.messages for text in texts_of(message["content"])) for prompt in prompts]
