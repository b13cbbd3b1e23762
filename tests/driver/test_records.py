"""What an attempt writes down and when: checkpoints, and how it ends when something fails while facts are on their way to the log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from molt.config import Config
from molt.driver.records import finish, is_save_due
from molt.errors import LogError, MoltError
from molt.learn.ranks import RankGroup
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
from tests.driver.test_leader import ScriptedPool, make_leader, writer  # noqa: F401 (a fixture)


async def fails(after_s: float, error: Exception) -> None:
    """One answer of a rank, or work that goes on beside the driver."""
    await asyncio.sleep(after_s)
    raise error


async def test_what_ended_the_ranks_first_is_told_to_everyone_who_waits_or_asks_later(tmp_path: Path) -> None:
    group = RankGroup(Config(), tmp_path, "run")
    settling = group._wait("settle", [asyncio.ensure_future(fails(0.0, LogError("no space left")))])
    publishing = group._wait("publish", [asyncio.ensure_future(fails(0.1, ActorDiedError()))])
    met = await asyncio.gather(settling, publishing, return_exceptions=True)
    assert [str(error) for error in met] == ["no space left", "no space left"]
    with pytest.raises(LogError, match="no space left"):
        await group.weights_digest()


async def test_attempt_that_fails_beside_a_failed_fact_ends_in_the_log_with_its_cause(
    tmp_path: Path,
    writer: LogWriter,  # noqa: F811
) -> None:
    leader = make_leader(tmp_path, writer, ScriptedPool())
    house = SimpleNamespace(producer=Producer(writer, "ends"))
    noted: list[str] = []
    with pytest.raises(MoltError, match="rank 0 died in publish"):
        async with finish(house, SimpleNamespace(note=noted.append), leader):  # type: ignore[arg-type]
            leader.follow(fails(0.05, ActorDiedError()))
            raise MoltError("trainer rank 0 died in publish")
    (body,) = LogReader.open(tmp_path / "run").cut().table("events", ["body"], where="kind = 'attempt_ended'")["body"].to_pylist()
    ended = json.loads(body)
    assert (ended["reason"], ended["error"]) == ("failed", "MoltError: trainer rank 0 died in publish")
    assert noted == ["the attempt ends: MoltError: trainer rank 0 died in publish"]


async def test_facts_outlive_a_cancelled_wait_for_them(tmp_path: Path, writer: LogWriter) -> None:  # noqa: F811
    leader = make_leader(tmp_path, writer, ScriptedPool())
    may_end = asyncio.Event()

    async def write() -> None:
        await may_end.wait()
        raise LogError("no space left")

    leader.follow(write())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await leader.settled()
    may_end.set()
    with pytest.raises(LogError, match="no space left"):
        await leader.settled()
    await leader.settled()  # it was heard


def test_checkpoints_are_made_at_the_first_new_version_past_each_interval():
    config = Config.model_validate({"ckpt": {"save_interval": 3}})
    saved: list[int] = []
    for step in range(1, 15, 2):  # versions begin after 1, 3, 5, ... steps, as where an attempt ended inside one of two steps
        if is_save_due(config, step=step, saved_step=saved[-1] if saved else None):
            saved.append(step)
    assert saved == [3, 7, 9, 13]  # past 3, 6, 9, 12
    assert not is_save_due(Config(), step=8, saved_step=None)
