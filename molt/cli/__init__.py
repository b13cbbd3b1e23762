"""The command line: `molt VERB`. Importing it, and `molt --help`, take in neither torch nor ray nor vllm."""

from __future__ import annotations


def main() -> None:
    """Entry of the `molt` script: runs the verb in sys.argv and leaves with its exit code."""
    import sys

    from molt.cli.app import run

    raise SystemExit(run(sys.argv[1:]))
