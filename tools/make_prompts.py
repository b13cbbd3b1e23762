"""Make a prompt set of a reasoning-gym task: one JSON line for each question, with its answer as label.

python tools/make_prompts.py chain_sum DEST.jsonl --size 500 --seed 0 --set min_terms=2 --set max_terms=2
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any


def make(task: str, dest: Path, *, size: int, seed: int, settings: dict[str, Any]) -> int:
    """Write the rows; questions that come twice are written once. Returns their number."""
    import reasoning_gym

    rows: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(task, size=size, seed=seed, **settings):
        answer = entry["answer"]
        if answer is not None:
            rows.setdefault(entry["question"], {"input": entry["question"], "label": str(answer), "task": task})
    dest.parent.mkdir(parents=True, exist_ok=True)
    dest.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()), encoding="utf-8")
    return len(rows)


def setting(text: str) -> tuple[str, Any]:
    """name=value, the value as a Python literal where it is one."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="name of a reasoning-gym data set")
    parser.add_argument("dest", type=Path)
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="setting of the data set")
    arguments = parser.parse_args()
    count = make(arguments.task, arguments.dest, size=arguments.size, seed=arguments.seed, settings=dict(arguments.set))
    print(f"{arguments.dest}: {count} questions")


if __name__ == "__main__":
    main()
