"""What is tried: estimators x gates x aggregations, each written as one short word. Imports no torch.

estimator     name[:key=value,...]                      grpo    gae:gamma=0.99,lambd=0.95    reinforce:whiten=false
gate          off | [decoupled/][kl/|tv/]level/mode[/low:high]   token/mask    seq/trunc/:2    tv/token/mask/:0.1    geo/clip/0.9:1.1
aggregation   token-mean | seq-mean-token-mean | prompt-mean-token-mean
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from molt.algo.rules import check_correction
from molt.config import AdvantageSettings, AlgoSettings
from molt.errors import SettingError

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "prompt-mean-token-mean")
LEVELS, MODES = ("token", "seq", "geo"), ("mask", "clip", "trunc")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorChoice:
    """One estimator with the settings of its own."""

    text: str
    name: str
    keys: dict[str, Any]

    def settings(self, base: AlgoSettings) -> AlgoSettings:
        """The run's settings under this estimator. Discounts are the run's where the run used this estimator, else 1."""
        own: dict[str, Any] = {} if base.advantage.estimator == self.name else {"gamma": 1.0, "lambd": 1.0, "whiten": None}
        advantage = base.advantage.model_dump() | own | {"estimator": self.name} | self.keys
        return base.model_copy(update={"advantage": AdvantageSettings.model_validate(advantage)})


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChoice:
    """One importance gate."""

    text: str
    keys: dict[str, Any]

    def settings(self, base: AlgoSettings) -> AlgoSettings:
        """The run's settings under this gate."""
        return base.model_copy(update={"advantage": base.advantage.model_copy(update=self.keys)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One estimator, one gate, one aggregation."""

    estimator: str
    gate: str
    aggregation: str

    @property
    def text(self) -> str:
        """Its name: the three words joined by plus signs."""
        return f"{self.estimator}+{self.gate}+{self.aggregation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of the three lists."""

    estimators: tuple[EstimatorChoice, ...]
    gates: tuple[GateChoice, ...]
    aggregations: tuple[str, ...]

    @property
    def variants(self) -> list[Variant]:
        """All combinations, estimator slowest."""
        return [
            Variant(estimator=estimator.text, gate=gate.text, aggregation=aggregation)
            for estimator, gate, aggregation in itertools.product(self.estimators, self.gates, self.aggregations)
        ]


def parse_grid(estimators: Sequence[str], gates: Sequence[str], bands: Sequence[str], aggregations: Sequence[str]) -> Grid:
    """The grid of the words given. bands are tried with every gate that names none and is not off. SettingError for a bad word."""
    for aggregation in aggregations:
        if aggregation not in AGGREGATIONS:
            raise SettingError(f"aggregations={aggregation}: unknown; known are {', '.join(AGGREGATIONS)}")
    words = [
        f"{gate}/{band}" if band is not None else gate
        for gate in gates
        for band in ([None] if gate == "off" or ":" in gate or not bands else bands)
    ]
    chosen = [parse_estimator(word) for word in _once(estimators)], [parse_gate(word) for word in _once(words)]
    return Grid(estimators=tuple(chosen[0]), gates=tuple(chosen[1]), aggregations=tuple(_once(aggregations)))


def _once(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(words))


def parse_estimator(text: str) -> EstimatorChoice:
    """Read name[:key=value,...]; the keys are those of algo.advantage."""
    name, _, rest = text.partition(":")
    keys = {}
    for part in rest.split(",") if rest else []:
        key, found, value = part.partition("=")
        if not found or key not in ("gamma", "lambd", "whiten"):
            raise SettingError(f"estimators={text}: {part!r} is not gamma=, lambd= or whiten=; write name:gamma=0.99")
        try:
            keys[key] = {"true": True, "false": False}[value] if key == "whiten" else float(value)
        except (KeyError, ValueError):
            raise SettingError(f"estimators={text}: {value!r} is no value of {key}") from None
    return EstimatorChoice(text=text, name=name, keys=keys)


def parse_gate(text: str) -> GateChoice:
    """Read off or [decoupled/][kl/|tv/]level/mode[/low:high]; SettingError for a gate that the algorithm refuses."""
    keys: dict[str, Any] = {
        "is_correction_level": "off", "is_correction_mode": "mask", "is_correction_threshold": (None, None),
        "is_mismatch_threshold": (None, None), "gate": "ratio", "decoupled": False,
    }  # fmt: skip
    parts = text.split("/")
    if text != "off":
        if parts[0] == "decoupled":
            keys["decoupled"] = True
            parts = parts[1:]
        if parts and parts[0] in ("kl", "tv"):
            keys["gate"], parts = parts[0], parts[1:]
        if len(parts) not in (2, 3) or parts[0] not in LEVELS or parts[1] not in MODES:
            raise SettingError(
                f"corrections={text}: write off or [decoupled/][kl/|tv/]level/mode[/low:high], with level {', '.join(LEVELS)} "
                f"and mode {', '.join(MODES)}"
            )
        keys["is_correction_level"], keys["is_correction_mode"] = parts[:2]
        if len(parts) == 3:
            keys["is_correction_threshold"] = _band(text, parts[2])
    check_correction(AdvantageSettings.model_validate(keys))
    return GateChoice(text=text, keys=keys)


def _band(text: str, band: str) -> tuple[float | None, float | None]:
    low, found, high = band.partition(":")
    try:
        if not found:
            raise ValueError
        return float(low) if low else None, float(high) if high else None
    except ValueError:
        raise SettingError(f"corrections={text}: {band!r} is no band; write low:high, either end may be left open") from None


def baseline_of(grid: Grid, text: str | None) -> Variant:
    """The variant that others are compared with: the one named, or the first."""
    if text is None:
        return grid.variants[0]
    found = [variant for variant in grid.variants if variant.text == text]
    if not found:
        raise SettingError(f"baseline={text} is not among the variants; the first is {grid.variants[0].text}")
    return found[0]
