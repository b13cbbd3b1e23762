"""A made log of six steps, shared by the tests of the offline tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from molt.config import Config
from tools.bench.made_run import make_run

SETTINGS = {"algo": {"advantage": {"estimator": "grpo", "is_correction_level": "token"}}}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with 6 steps of 4 groups of 4."""
    return make_run(tmp_path_factory.mktemp("runs") / "made", Config.model_validate(SETTINGS), num_steps=6)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without values, reference and teacher."""
    return make_run(tmp_path_factory.mktemp("runs") / "bare", Config.model_validate(SETTINGS), num_steps=2, has_extras=False)
