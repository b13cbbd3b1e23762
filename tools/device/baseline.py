"""What the untrained model gets on candidate tasks, by way of asking and temperature: which of them can be learned from."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from molt.agents.load import load_agent
from molt.rollout.engine import Sampling
from tools.device.parts import ROOT

AGENT = sys.modules[load_agent(ROOT / "examples" / "few_shot_sum_agent.py").runner.__module__]

NUM_PROMPTS = 96
STYLES = ("plain", "system", "shots")


def messages(style: str, question: str) -> list[dict[str, Any]]:
    """The question as the style asks it."""
    if style == "shots":
        return [dict(message) for message in AGENT.opening(question)]
    asked = [{"role": "user", "content": question}]
    return asked if style == "plain" else [{"role": "system", "content": AGENT.SYSTEM}, *asked]


async def baselines(engine: Any, tokenizer: Any, files: list[Path], *, temperatures: tuple[float, ...] = (1.0, 0.7)) -> dict[str, Any]:
    """Share of right answers, mean length and three answers, for each task, style and temperature."""
    stops = tuple(tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>"))
    found: dict[str, Any] = {}
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        random.Random(0).shuffle(rows)
        rows = rows[:NUM_PROMPTS]
        for style in STYLES:
            prompts = [
                tokenizer(
                    tokenizer.apply_chat_template(messages(style, row["input"]), tokenize=False, add_generation_prompt=True),
                    add_special_tokens=False,
                )["input_ids"]
                for row in rows
            ]
            for temperature in temperatures:
                name = f"{file.stem} {style} T={temperature}"
                sampling = [
                    Sampling(max_new_tokens=32, temperature=temperature, seed=number, stop_token_ids=stops) for number in range(len(rows))
                ]
                calls = [
                    engine.generate(f"{name} {number}", prompt, sampling[number])
                    for number, prompt in enumerate(prompts)
                    if len(prompt) < 900
                ]
                done = await asyncio.gather(*calls)
                texts = [tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True) for generation in done]
                kept = [row for row, prompt in zip(rows, prompts, strict=True) if len(prompt) < 900]
                found[name] = {
                    "reward": round(sum(_grade(text, row["label"]) for text, row in zip(texts, kept, strict=True)) / max(1, len(kept)), 3),
                    "length": round(sum(len(generation.token_ids) for generation in done) / max(1, len(done)), 1),
                    "shown": [text[:40] for text in texts[:3]],
                }
    return found


def _grade(text: str, label: str) -> bool:
    if label.lstrip("-").isdigit():
        return bool(AGENT.is_right(text, label))
    return text.strip().strip(".").lower() == label.strip().lower()
