"""Fixtures of the learner's tests: a process group of one, and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.learn.tiny import make_model


@pytest.fixture(scope="session", autouse=True)
def group_of_one() -> Iterator[None]:
    """A gloo group with this process alone in it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny tied dense model."""
    return make_model(tmp_path_factory.mktemp("model"))
