"""`python3 -m molt.cli.train_rl_ray`: Molt's published command line, as it is written, on the train verb."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from molt.cli.report import note
from molt.settings import RENAMED

WITHOUT_EFFECT: dict[str, str] = {
    "train.micro_batch_size": "micro-batches are packed by tokens, see train.micro_batch_tokens",
    "train.colocate_fsdp_models": "the reference always shares the ranks of the actor",
    "logger.logging_steps": "every step is an event in the log",
}
"""Published flags whose need has gone; they are taken, and a line says why they do nothing."""

RENAMED_VALUES: dict[tuple[str, str], str] = {("algo.advantage.gate", "binary_kl"): "kl"}
"""Values that have another name now, by setting."""


def translate(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line with today's names, and a line for each flag that was renamed or left out."""
    translated: list[str] = []
    notes: list[str] = []
    is_dropping, setting = False, ""
    for token in tokens:
        if not token.startswith("--"):
            if not is_dropping:
                translated.append(RENAMED_VALUES.get((setting, token), token))
            continue
        name, equals, value = token[2:].partition("=")
        key = name.replace("-", "_")
        is_dropping = key in WITHOUT_EFFECT
        if is_dropping:
            notes.append(f"--{name} does nothing here: {WITHOUT_EFFECT[key]}")
            continue
        if key in RENAMED:
            notes.append(f"--{name} is --{RENAMED[key]} now")
        setting = RENAMED.get(key, key)
        if equals:
            translated.append(f"--{setting}={RENAMED_VALUES.get((setting, value), value)}")
        else:
            translated.append(f"--{setting}")
    return translated, notes


def main(tokens: Sequence[str]) -> int:
    """Run the train verb with a published command line; returns its exit code."""
    from molt.cli.app import run

    translated, notes = translate(tokens)
    for line in notes:
        note(line)
    return run(["train", *translated])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
