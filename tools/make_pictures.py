"""Make a prompt set of pictures: coloured circles and squares on white, and the question how many circles there are.

python tools/make_pictures.py prompts/shapes --size 500 --seed 0 --pixels 512    # prompts/shapes/prompts.jsonl and its pictures beside it
"""

from __future__ import annotations

import argparse
from pathlib import Path

from molt.data.tiny_vision import make_pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, help="folder")
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pixels", type=int, default=512, help="edge of a picture")
    parser.add_argument("--most", type=int, default=6, help="most shapes in a picture")
    arguments = parser.parse_args()
    make_pictures(arguments.dest, num_prompts=arguments.size, seed=arguments.seed, num_pixels=arguments.pixels, most=arguments.most)
    print(f"{arguments.dest / 'prompts.jsonl'}: {arguments.size} pictures")


if __name__ == "__main__":
    main()
