"""Words for estimators, gates and aggregations."""

from __future__ import annotations

import pytest

from molt.ablate.variants import baseline_of, parse_estimator, parse_gate, parse_grid
from molt.config import AlgoSettings
from molt.errors import SettingError


def test_a_grid_is_every_combination_once():
    grid = parse_grid(["grpo", "rloo", "grpo"], ["off", "token/mask"], [], ["token-mean"])
    assert [v.text for v in grid.variants] == [
        "grpo+off+token-mean",
        "grpo+token/mask+token-mean",
        "rloo+off+token-mean",
        "rloo+token/mask+token-mean",
    ]


def test_bands_go_to_the_gates_that_name_none():
    grid = parse_grid(["grpo"], ["off", "token/mask", "seq/mask/0.1:9"], ["0.5:2", "0.9:1.1"], ["token-mean"])
    assert [gate.text for gate in grid.gates] == ["off", "token/mask/0.5:2", "token/mask/0.9:1.1", "seq/mask/0.1:9"]


@pytest.mark.parametrize(
    ("text", "level", "mode", "band", "gate", "decoupled"),
    [
        ("off", "off", "mask", (None, None), "ratio", False),
        ("token/mask", "token", "mask", (None, None), "ratio", False),
        ("geo/clip/0.9:1.1", "geo", "clip", (0.9, 1.1), "ratio", False),
        ("seq/trunc/:2", "seq", "trunc", (None, 2.0), "ratio", False),
        ("tv/token/mask/:0.1", "token", "mask", (None, 0.1), "tv", False),
        ("decoupled/token/mask", "token", "mask", (None, None), "ratio", True),
    ],
)
def test_a_gate_is_one_word(text, level, mode, band, gate, decoupled):
    keys = parse_gate(text).keys
    assert (keys["is_correction_level"], keys["is_correction_mode"], keys["is_correction_threshold"]) == (level, mode, band)
    assert (keys["gate"], keys["decoupled"]) == (gate, decoupled)


@pytest.mark.parametrize(
    "text", ["token", "tokens/mask", "token/cut", "token/mask/2", "token/mask/a:b", "token/mask/1:2:3/4", "kl/token/clip"]
)
def test_a_bad_gate_is_refused(text):
    with pytest.raises(SettingError):
        parse_gate(text)


def test_an_estimator_may_carry_its_own_settings():
    choice = parse_estimator("gae:gamma=0.9,lambd=0.8,whiten=false")
    settings = choice.settings(AlgoSettings())
    assert (settings.advantage.estimator, settings.advantage.gamma, settings.advantage.lambd) == ("gae", 0.9, 0.8)
    assert settings.advantage.whiten is False


def test_discounts_of_the_run_stay_with_its_own_estimator():
    base = AlgoSettings.model_validate({"advantage": {"estimator": "reinforce", "gamma": 0.9}})
    assert parse_estimator("reinforce").settings(base).advantage.gamma == 0.9
    assert parse_estimator("grpo").settings(base).advantage.gamma == 1.0


@pytest.mark.parametrize("text", ["gae:gamma", "gae:beta=1", "gae:gamma=x", "gae:whiten=1"])
def test_a_bad_estimator_setting_is_refused(text):
    with pytest.raises(SettingError, match=r"estimators="):
        parse_estimator(text)


def test_the_baseline_is_the_first_unless_named():
    grid = parse_grid(["grpo", "rloo"], ["off"], [], ["token-mean"])
    assert baseline_of(grid, None).estimator == "grpo"
    assert baseline_of(grid, "rloo+off+token-mean").estimator == "rloo"
    with pytest.raises(SettingError, match="baseline=x is not among"):
        baseline_of(grid, "x")


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(SettingError, match="aggregations=mean"):
        parse_grid(["grpo"], ["off"], [], ["mean"])
