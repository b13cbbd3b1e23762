"""Plot what staleness costs: rewards by max_lag at a common step, with and without decoupled correction, beside AReaL's published scores.

python tools/plot_lag.py docs/evidence/learns.json --dest docs/evidence/lags.svg
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from html import escape
from pathlib import Path
from typing import Any

AREAL: dict[str, tuple[float | None, float | None]] = {
    "0": (42.0, None),
    "1": (41.8, 42.1),
    "2": (40.0, 41.8),
    "4": (23.3, 42.2),
    "8": (35.7, 41.0),
    "16": (35.8, 38.7),
    "unbounded": (34.0, 36.9),
}
"""AIME24 by max lag: naive, decoupled (AReaL, its own 1.5B model). The shape is what compares, not the numbers."""
LINES = (("naive", "#b5574a"), ("decoupled", "#1b3a5c"))
WINDOW = 10
"""Steps that are averaged."""
WIDTH, HEIGHT, LEFT, TOP = 430, 300, 60, 60


def points(runs: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean reward of the ten steps before the last that all runs made, and the half width of its interval over steps; by line and lag."""
    common = min((run["num_steps"] for run in runs), default=0)
    found: dict[str, dict[str, list[float]]] = {name: {} for name, _ in LINES}
    for run in runs:
        line = "decoupled" if "decoupled" in run["correction"] else "naive"
        found[line].setdefault(str(run["max_lag"]), []).extend(step[1] for step in run["steps"][:common][-WINDOW:])
    return {
        line: {
            lag: (statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0)
            for lag, values in by_lag.items()
        }
        for line, by_lag in found.items()
    }


def panel(title: str, lines: dict[str, dict[str, tuple[float, float]]], left: int) -> list[str]:
    """One chart: lags on a common axis of ranks, a dot and its interval for each."""
    lags = sorted(
        {lag for by_lag in lines.values() for lag in by_lag}, key=lambda lag: (lag == "unbounded", int(lag) if lag.isdigit() else 0)
    )
    ends = [end for by_lag in lines.values() for mean, half in by_lag.values() for end in (mean - half, mean + half)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    span = (high - low) or 1.0
    low, high = low - 0.1 * span, high + 0.1 * span

    def x(lag: str) -> float:
        return left + LEFT + lags.index(lag) * (WIDTH - LEFT - 30) / max(1, len(lags) - 1)

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - 50), 1)

    parts = [f'<text x="{left + LEFT}" y="24" font-size="13" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        parts.append(f'<line x1="{left + LEFT}" x2="{left + WIDTH - 20}" y1="{y(value)}" y2="{y(value)}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{left + LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>')
    for lag in lags:
        parts.append(f'<text x="{x(lag):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{escape(lag)}</text>')
    parts.append(
        f'<text x="{left + (LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#666">max lag, policy versions</text>'
    )
    for number, (name, colour) in enumerate(LINES):
        by_lag = [(lag, *lines[name][lag]) for lag in lags if lag in lines.get(name, {})]
        path = " ".join(f"{x(lag):.1f},{y(mean)}" for lag, mean, _ in by_lag)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for lag, mean, half in by_lag:
            parts.append(f'<line x1="{x(lag):.1f}" x2="{x(lag):.1f}" y1="{y(mean - half)}" y2="{y(mean + half)}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x(lag):.1f}" cy="{y(mean)}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{left + LEFT + 100 * number}" y="44" fill="{colour}">{name}</text>')
    return parts


def svg(runs: list[dict[str, Any]]) -> str:
    """Both charts side by side."""
    published = {
        name: {lag: (pair[place], 0.0) for lag, pair in AREAL.items() if pair[place] is not None} for place, (name, _) in enumerate(LINES)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="white"/>',
        *panel("Molt: mean reward, same number of steps", points(runs), 0),
        *panel("AReaL as published: AIME24", published, WIDTH),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def runs_of(files: list[Path]) -> list[dict[str, Any]]:
    """Float32 runs of several records of tools/device/learn.py."""
    found = [run for file in files for run in json.loads(file.read_text())["parts"]["runs"].values()]
    return [run for run in found if isinstance(run, dict) and "reward_last" in run and run.get("dtype") == "float32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--dest", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.dest.write_text(svg(runs_of(arguments.files)), encoding="utf-8")
    print(arguments.dest)


if __name__ == "__main__":
    main()
