"""A tiny dense model for the tests of parity."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learn.tiny import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny tied dense model, without a tokenizer."""
    return make_model(tmp_path_factory.mktemp("model"))
