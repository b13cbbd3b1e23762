"""Rules between settings, and what the package may import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from molt.algo.estimators import get_estimator
from molt.algo.rules import check_algo, check_estimator, mismatch_band
from molt.errors import SettingError
from tests.algo.build import algo


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"loss": {"name": "cispo", "dual_clip": 3.0}}, r"dual_clip=3.0 needs algo.loss.name=ppo"),
        ({"loss": {"dual_clip": 0.5}}, "a value above 1"),
        ({"kl": {"target": 0.1}}, r"algo.kl.target=0.1 needs algo.kl.coef > 0"),
        ({"reward": {"clip": (1.0, -1.0)}}, "wrong way round"),
        ({"reward": {"filter_range": (1.0, 0.0)}}, "keeps nothing"),
        ({"reward": {"stop_properly_penalty": 2.0}}, r"must lie in \[0, 1\]"),
    ],
)
def test_settings_that_cannot_hold_are_refused(sections, text):
    with pytest.raises(SettingError, match=text):
        check_algo(algo(**sections))


def test_the_defaults_hold():
    check_algo(algo())


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
@pytest.mark.parametrize("mode", ["mask", "clip", "trunc"])
def test_every_level_and_mode_has_a_default_band_that_holds_one(level, mode):
    settings = algo(advantage={"is_correction_level": level, "is_correction_mode": mode})
    check_algo(settings)
    low, high = mismatch_band(settings.advantage)
    assert (low is None) == (mode == "trunc")
    assert (low or 0) < 1 < high


def test_divergences_have_their_own_default_bands():
    def high(gate, level):
        return mismatch_band(algo(advantage={"is_correction_level": level, "gate": gate}).advantage)

    assert high("kl", "token") == (None, 0.05)
    assert high("tv", "token") == (None, 0.15)
    assert high("kl", "seq") == (None, 0.005)  # FlashREINFORCE
    assert high("tv", "seq") == (None, 0.05)  # sqrt(0.005 / 2)


def test_a_divergence_as_reward_is_refused_where_no_reward_is_read():
    chosen = get_estimator("on_policy_distill")
    with pytest.raises(SettingError, match=r"algo.kl.use=reward does nothing"):
        check_estimator(algo(kl={"coef": 0.1, "use": "reward"}), name=chosen.name, uses=chosen.uses, needs=chosen.needs)


def test_rules_import_no_torch():
    code = "import sys, molt.algo.rules; sys.exit(int(any(name in sys.modules for name in ('torch', 'numpy', 'ray', 'vllm'))))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_algorithms_import_torch_and_numpy_only():
    code = (
        "import sys, molt.algo.advantage, molt.algo.correction, molt.algo.loss, molt.algo.kl, molt.algo.reward, molt.algo.value;"
        "sys.exit(int(any(name in sys.modules for name in ('ray', 'vllm', 'transformers', 'pyarrow', 'lance', 'duckdb', 'pydantic'))))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
