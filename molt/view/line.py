"""One line of key=value per step or word, for a terminal that is none: logs, pipes, schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from molt.view.pace import Pace, duration
from molt.view.plain import plain

SHOWN = ("version", "reward", "loss", "grad_norm", "kl", "lag", "ready", "running", "train_s", "log_s", "wait_s", "refused")
"""Figures of a step in the order of the line; others follow."""
HIDDEN = ("step", "n_sampled", "n_kept")
"""Figures that the line shows in another form."""


def step_line(figures: Mapping[str, Any], pace: Pace) -> str:
    """The line of one step."""
    shown: dict[str, Any] = {"step": figures.get("step"), "of": pace.num_steps}
    shown |= {name: figures[name] for name in SHOWN if figures.get(name) is not None}
    shown["rejected"] = rejected_share(figures)
    shown["tokens_per_s"] = pace.tokens_per_s
    shown["eta"] = duration(pace.eta_s)
    shown |= {name: value for name, value in figures.items() if name not in shown and name not in HIDDEN}
    return key_values(shown)


def key_values(pairs: Mapping[str, Any]) -> str:
    """`a=1 b="two words"`; what is None is left out."""
    return " ".join(f"{name}={_value(value)}" for name, value in pairs.items() if value is not None)


def rejected_share(figures: Mapping[str, Any]) -> float | None:
    """Share of sampled tokens that the gate did not keep; None when nothing was sampled."""
    sampled, kept = figures.get("n_sampled"), figures.get("n_kept")
    return None if not sampled or kept is None else 1 - kept / sampled


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = plain(value).replace("\n", "\\n").replace("\t", "\\t")
    return '"' + text.replace('"', '\\"') + '"' if not text or any(char in text for char in ' "=') else text
