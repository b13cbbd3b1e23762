"""An evaluation that its attempt ended without is made by the next one, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molt.driver.evaluation import evaluate, evaluate_lost
from molt.driver.house import alongside
from molt.errors import StalledError
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
from molt.rollout.tasks import FinishedGroup, GroupTask, RolloutDone
from tests.driver.test_leader import ScriptedPool, make_leader, writer  # noqa: F401 (a fixture)


async def test_evaluation_that_was_cut_off_is_made_once_under_names_of_its_own(tmp_path: Path, writer: LogWriter) -> None:  # noqa: F811
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"input": "1+1", "label": "2"}\n{"input": "1+2", "label": "3"}\n')
    pool = ScriptedPool(is_failing=True)
    rooms: dict[str, Any] = {"eval": {"interval": 2}, "data": {"eval_dataset": str(questions)}}
    leader = make_leader(tmp_path, writer, pool, **rooms)
    leader.is_draining = True  # nothing to train here
    asked = SimpleNamespace(dispatch=pool.dispatch, newcomers=[])
    ranks = SimpleNamespace(published_digest="served")
    house: Any = SimpleNamespace(config=leader.config, reader=leader.reader, pool=asked, ranks=ranks, attempt=3)
    async with asyncio.timeout(20), alongside(leader.feed()):
        for step in (0, 3, 4, 4):  # none is due at 0 and 3, and the second time there is one of step 4
            await evaluate_lost(house, leader, step=step, policy_version=4)
            await leader.settled()
    assert [task.group_id for task in pool.dispatched] == ["eval4.3-p0", "eval4.3-p1"]
    bodies = LogReader.open(tmp_path / "run").cut().table("events", ["body"], where="kind = 'evaluated'")["body"].to_pylist()
    (told,) = map(json.loads, bodies)
    assert (told["step"], told["policy_version"], told["num_failed"], told["weights_digest"]) == (4, 4, 2, "served")


class GradingPool(ScriptedPool):
    """Ends both members of each group at once: one scored 1, one that could not be scored."""

    async def dispatch(self, *groups: GroupTask) -> None:
        await super().dispatch(*groups)
        for group in groups:
            done = tuple(self._done(group, member, reward) for member, reward in enumerate((1.0, None)))
            self._finished.append(FinishedGroup(group=group, done=done, failed=()))

    def _done(self, group: GroupTask, member: int, reward: float | None) -> RolloutDone:
        return RolloutDone(
            rollout_id=f"{group.group_id}/{member}/0", group_id=group.group_id, member=member, engine="scripted", num_segments=1,
            num_turns=1, n_tokens=4, n_sampled=2, reward=reward, version_min=0, is_truncated=False, duration_s=0.1,
        )  # fmt: skip


async def test_rollouts_that_could_not_be_scored_are_told_beside_the_mean(tmp_path: Path, writer: LogWriter) -> None:  # noqa: F811
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"input": "1+1", "label": "2"}\n{"input": "1+2", "label": "3"}\n')
    pool = GradingPool()
    leader = make_leader(tmp_path, writer, pool, eval={"interval": 1, "n_samples_per_prompt": 2}, data={"eval_dataset": str(questions)})
    leader.is_draining = True
    asked, ranks = SimpleNamespace(dispatch=pool.dispatch, newcomers=[]), SimpleNamespace(published_digest="served")
    house: Any = SimpleNamespace(config=leader.config, reader=leader.reader, pool=asked, ranks=ranks, attempt=1)
    async with asyncio.timeout(20), alongside(leader.feed()):
        assert await evaluate(house, leader, step=1, policy_version=1) == 1.0
        await leader.settled()
    (body,) = LogReader.open(tmp_path / "run").cut().table("events", ["body"], where="kind = 'evaluated'")["body"].to_pylist()
    told = json.loads(body)
    assert (told["num_rollouts"], told["num_unscored"], told["num_failed"]) == (2, 2, 0)


class SlowPool(GradingPool):
    """Ends one group at each look, each half a second after the last, and no more than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most
        self.next_s = 0.0

    def ready(self) -> list[FinishedGroup]:
        now = asyncio.get_running_loop().time()
        if not self._finished or not self.left or now < self.next_s:
            return []
        self.left, self.next_s = self.left - 1, now + 0.5
        return [self._finished.pop(0)]


@pytest.mark.parametrize("most", [5, 2])
async def test_an_evaluation_may_take_long_as_long_as_groups_end(most: int, tmp_path: Path, writer: LogWriter) -> None:  # noqa: F811
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"input": "1+1", "label": "2"}\n' * 5)
    pool = SlowPool(most)
    rooms: dict[str, Any] = {"data": {"eval_dataset": str(questions)}, "train": {"step_timeout_s": 1.5}}  # five groups take 2 s
    leader = make_leader(tmp_path, writer, pool, eval={"interval": 1, "n_samples_per_prompt": 2}, **rooms)
    leader.is_draining = True
    asked = SimpleNamespace(dispatch=pool.dispatch, newcomers=[], describe=pool.describe)
    house: Any = SimpleNamespace(config=leader.config, pool=asked, ranks=SimpleNamespace(published_digest="served"), attempt=1)
    async with asyncio.timeout(20), alongside(leader.feed()):
        if most == 5:
            assert await evaluate(house, leader, step=1, policy_version=1) == 1.0
            return
        with pytest.raises(StalledError, match="evaluation at step 1: 2 of 5 groups ended; scripted"):
            await evaluate(house, leader, step=1, policy_version=1)
    (body,) = LogReader.open(tmp_path / "run").cut().table("events", ["body"], where="kind = 'wait_ended_badly'")["body"].to_pylist()
    assert json.loads(body)["what"] == "evaluation at step 1"
