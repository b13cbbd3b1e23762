"""What ends a group of ranks is named: our own error first, then a death, then whatever the ranks raised; a wait has a limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from molt.errors import MoltError, ReplayMismatchError, StalledError
from molt.learn.ranks import RankGroup
from tests.learn.tiny import make_config


async def ends(after_s: float, error: Exception | None = None) -> str:
    await asyncio.sleep(after_s)
    if error is not None:
        raise error
    return "answer"


async def ask(folder: Path, *ranks: asyncio.Future, limit_s: float = 30.0) -> list[str]:
    group = RankGroup(make_config(folder, train={"step_timeout_s": limit_s}), folder, "run")
    return await group._wait("train", list(ranks))


def task(after_s: float, error: Exception | None = None) -> asyncio.Future:
    return asyncio.ensure_future(ends(after_s, error))


async def test_answers_come_in_rank_order(tmp_path: Path) -> None:
    assert await ask(tmp_path, task(0.02), task(0.0)) == ["answer", "answer"]


async def test_death_of_a_rank_is_named_though_its_partner_complains_first(tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    with pytest.raises(MoltError, match=r"trainer rank 1 died in train .*--resume"):
        await ask(tmp_path, task(0.0, RuntimeError("connection closed by peer")), task(0.1, RayActorError()))


async def test_own_error_is_raised_bare_and_at_once(tmp_path: Path) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(ReplayMismatchError, match="step 3"):
        await ask(tmp_path, task(60.0), task(0.0, ReplayMismatchError("step 3: loss digest")))
    assert asyncio.get_running_loop().time() - began < 4.0  # it does not wait for the partner


async def test_rank_that_does_not_answer_is_named_at_the_limit(tmp_path: Path) -> None:
    with pytest.raises(StalledError, match=r"trainer ranks \[1\] did not answer train in train.step_timeout_s=0.1"):
        await ask(tmp_path, task(0.0), task(60.0), limit_s=0.1)
