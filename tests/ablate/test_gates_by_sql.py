"""The gate in Python and the gate in SQL are two programs: on the same log-probs they must agree."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from molt.audit.ask import ask
from molt.config import Config
from tools.bench.made_run import make_run

RATIO = [
    (level, mode, "ratio", decoupled)
    for level, mode, decoupled in itertools.product(("token", "seq", "geo"), ("mask", "clip", "trunc"), (False, True))
]
DIVERGENCE = [
    (level, "mask", gate, decoupled) for level, gate, decoupled in itertools.product(("token", "seq"), ("kl", "tv"), (False, True))
]
QUICK = [("token", "mask", "ratio", True), ("seq", "clip", "ratio", True), ("seq", "mask", "kl", True)]


def differing(folder: Path, level: str, mode: str, gate: str, decoupled: bool) -> list[tuple[object, ...]]:
    """Segments on which a made log and the question disagree; stale tokens drift by a fifth of a nat a version."""
    advantage = {"estimator": "grpo", "is_correction_level": level, "is_correction_mode": mode, "gate": gate, "decoupled": decoupled}
    config = Config.model_validate({"algo": {"advantage": advantage}})
    make_run(folder / "run", config, num_steps=3, groups_per_step=2, mean_length=20, drift=0.2, has_extras=False)
    return ask(folder / "run", "gates_recomputed").rows


@pytest.mark.parametrize(("level", "mode", "gate", "decoupled"), QUICK)
def test_sql_finds_the_same_gate(tmp_path, level, mode, gate, decoupled):
    assert differing(tmp_path, level, mode, gate, decoupled) == []


@pytest.mark.slow
@pytest.mark.parametrize(("level", "mode", "gate", "decoupled"), [case for case in RATIO + DIVERGENCE if case not in QUICK])
def test_sql_finds_the_same_gate_in_every_case(tmp_path, level, mode, gate, decoupled):
    assert differing(tmp_path, level, mode, gate, decoupled) == []
