"""Models and prompts of the device programs: SmolLM2 from its GGUF pieces, or a tiny model in a rehearsal; sums as questions."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.device.parts import ROOT

PIECES = ROOT / ".device"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a run is about."""

    model: Path
    prompts: Path
    agent: Path
    max_len: int
    max_new_tokens: int


def make_world(work: Path, *, is_rehearsal: bool, task: str = "sums", tokenizer: Path | None = None) -> World:
    """Make what is not there yet. task: sums, or the name of a file of prompts that came with the kit. tokenizer: a folder in place of
    SmolLM2's, for programs that need no more of it."""
    agent = ROOT / "examples" / "few_shot_sum_agent.py"
    prompts = work / "prompts.jsonl"
    if is_rehearsal:
        from molt.data.tiny import make_model

        if not (work / "tiny" / "config.json").is_file():
            make_model(work / "tiny")
        make_sums(prompts, text="{a}+{b}", num_prompts=256)
        return World(model=work / "tiny", prompts=prompts, agent=agent, max_len=160, max_new_tokens=8)
    if task != "sums":
        return World(model=make_smollm2(work), prompts=find_prompts(task), agent=agent, max_len=256, max_new_tokens=48)
    make_sums(prompts, text="What is {a} + {b}? Answer with the number only.", num_prompts=4096)
    return World(model=tokenizer or make_smollm2(work), prompts=prompts, agent=agent, max_len=256, max_new_tokens=48)


def find_prompts(task: str) -> Path:
    """Prompts of a reasoning-gym task, made by tools/make_prompts.py elsewhere."""
    places = [folder / f"{task}.jsonl" for folder in (Path.home() / "kit", *sorted(PIECES.glob("*")))]
    return next(place for place in (*places, Path(task)) if place.is_file())


def make_smollm2(work: Path) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct, from the GGUF or its pieces."""
    folder = work / "smollm2"
    if not (folder / "config.json").is_file():
        from tools.make_smollm2 import convert

        work.mkdir(parents=True, exist_ok=True)
        partial = work / "smollm2.partial"
        shutil.rmtree(partial, ignore_errors=True)
        convert(find_gguf(work), partial, dtype="bfloat16")
        partial.rename(folder)
    return folder


def find_gguf(work: Path) -> Path:
    """The GGUF, put together from SmolLM2.gguf.0, .1 ... in the folders of the kit or in $HOME/kit, or of the installed package."""
    joined = work / GGUF
    if joined.is_file():
        return joined
    for folder in (Path.home() / "kit", *sorted(PIECES.glob("*"))):
        pieces = sorted(folder.glob("SmolLM2.gguf.*"), key=lambda path: int(path.suffix[1:]))
        if pieces:
            partial = joined.with_suffix(".partial")
            with open(partial, "wb") as out:
                for piece in pieces:
                    with open(piece, "rb") as part:
                        shutil.copyfileobj(part, out, 1 << 20)
            if partial.stat().st_size == GGUF_BYTES:
                partial.rename(joined)
                return joined
    from tools.make_smollm2 import find_gguf as installed

    return installed()


def make_sums(file: Path, *, text: str, num_prompts: int, seed: int = 0) -> None:
    """Sums of two numbers of one or two digits; no question comes twice."""
    rng = random.Random(seed)
    pairs = {(rng.randint(1, 99), rng.randint(1, 99)): None for _ in range(num_prompts)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"input": text.format(a=a, b=b), "label": str(a + b)}) + "\n" for a, b in pairs))
