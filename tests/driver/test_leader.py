"""The leader over a real log and a scripted pool: what it dispatches, drops, and when it gives up."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molt.admission.plan import StepPlan, plan_step
from molt.config import Config
from molt.data.prompts import PromptSet
from molt.driver.house import alongside
from molt.driver.leader import MAX_REFUSED, Leader
from molt.driver.versions import VersionClock
from molt.errors import DataError, StalledError
from molt.learn.result import Refusal, RefusalReason, StepResult
from molt.log.message import Ack, Message
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import event
from molt.log.writer import LogWriter
from molt.rollout.tasks import FailureReason, FinishedGroup, GroupTask, RolloutFailed
from tests.learn.tiny import make_rows, to_segments


class ScriptedPool:
    """Takes groups and, where told to, fails each of them at once."""

    def __init__(self, *, is_failing: bool = False) -> None:
        self.is_failing = is_failing
        self.dispatched: list[GroupTask] = []
        self._finished: list[FinishedGroup] = []

    async def dispatch(self, *groups: GroupTask) -> None:
        self.dispatched += groups
        for group in groups if self.is_failing else ():
            failed = tuple(self._failure(group, member) for member in group.members)
            self._finished.append(FinishedGroup(group=group, done=(), failed=failed))

    def _failure(self, group: GroupTask, member: int) -> RolloutFailed:
        reason, error = FailureReason.AGENT_ERROR, "KeyError: 'no such tool'"
        return RolloutFailed(
            rollout_id=f"{group.group_id}/{member}/0", group_id=group.group_id, member=member, engine="scripted", reason=reason,
            error=error, n_sampled=0, num_tries=1,
        )  # fmt: skip

    def ready(self) -> list[FinishedGroup]:
        finished, self._finished = self._finished, []
        return finished

    def describe(self) -> str:
        return "scripted"


class WritingPool(ScriptedPool):
    """Ends each rollout at once: its segment, sampled under the version told for its group, goes into the log."""

    def __init__(self, writer: LogWriter, *, versions: Sequence[int]) -> None:
        super().__init__()
        self.versions = list(versions)
        """Of each group in the order of dispatch."""
        self._producer = Producer(writer, "pool")

    async def dispatch(self, *groups: GroupTask) -> None:
        await super().dispatch(*groups)
        for group in groups:
            (row,) = make_rows(1, version=self.versions[len(self.dispatched) - len(groups) + groups.index(group)])
            (segment,) = to_segments([replace(row, segment_id=f"{group.group_id}/0/0/0")])
            placed = replace(segment, group_size=1, prompt_index=group.prompt.prompt_index, reward=1.0)
            await self._producer.append(segments=[placed])
            self._finished.append(FinishedGroup(group=group, done=(), failed=()))


class SlowSink:
    """A log whose answers take a while."""

    def __init__(self, writer: LogWriter, pause_s: float) -> None:
        self.run, self.attempt = writer.run, writer.attempt
        self._writer, self._pause_s = writer, pause_s
        self._thread = ThreadPoolExecutor(1)

    def submit(self, message: Message) -> Future[Ack]:
        def answer() -> Ack:
            time.sleep(self._pause_s)
            return self._writer.submit(message).result(10)

        return self._thread.submit(answer)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process") as writer:
        yield writer


async def nothing() -> None:
    """What a leader does meanwhile here."""


def make_leader(tmp_path: Path, writer: LogWriter, pool: ScriptedPool, *, num_prompts: int = 64, **changes: dict[str, Any]) -> Leader:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"input": "{i}+1", "label": "{i + 1}"}}\n' for i in range(num_prompts)))
    config = Config.model_validate(
        {"train": {"batch_size": 4, "num_steps": 20}, "rollout": {"batch_size": 2, "n_samples_per_prompt": 2}} | changes
    )
    ranks = SimpleNamespace(expect=lambda plan: None)
    house = SimpleNamespace(reader=LogReader.open(tmp_path / "run"), producer=Producer(writer, "driver"), pool=pool, ranks=ranks)
    return Leader(config, prompts=PromptSet.load(str(prompts), config.data), house=house, say=lambda text: None)


def events(tmp_path: Path, kind: str) -> int:
    return LogReader.open(tmp_path / "run").cut().table("events", ["lsn"], where=f"kind = '{kind}'").num_rows


async def test_run_that_goes_on_with_smaller_steps_dispatches_for_those_to_go(tmp_path: Path, writer: LogWriter):
    pool = ScriptedPool()
    leader = make_leader(tmp_path, writer, pool, train={"batch_size": 2, "num_steps": 5}, admission={"max_lag": 9})
    leader.inbox.num_consumed = 8  # four steps of two groups: more than five steps of one group ever need
    leader.inbox.begin_version()
    leader.next_step = 4
    async with asyncio.timeout(20):
        feed = asyncio.create_task(leader.feed())
        while not pool.dispatched:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
    assert len(pool.dispatched) == 1  # one step to go, of one group


async def test_feed_dispatches_what_the_lag_bound_allows_and_more_with_a_new_version(tmp_path: Path, writer: LogWriter):
    pool = ScriptedPool()
    leader = make_leader(tmp_path, writer, pool, admission={"max_lag": 1})
    async with asyncio.timeout(20):
        feed = asyncio.create_task(leader.feed())
        while len(pool.dispatched) < 4:  # (1 + 1) * 2 groups
            await asyncio.sleep(0.01)
        for group_id in [task.group_id for task in pool.dispatched[:2]]:
            del leader.inbox.open[group_id]  # as if they had trained
        leader.inbox.num_consumed += 2
        leader.serve(1)
        leader.inbox.begin_version()
        while len(pool.dispatched) < 6:  # 2 run, 4 may
            await asyncio.sleep(0.01)
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
    order = [leader.order.place(i).group_id for i in range(6)]
    assert [task.group_id for task in pool.dispatched] == order
    assert leader.inbox.num_running == 4


async def test_groups_that_only_fail_end_the_run_with_the_last_error(tmp_path: Path, writer: LogWriter):
    leader = make_leader(tmp_path, writer, ScriptedPool(is_failing=True))
    async with asyncio.timeout(20):
        with pytest.raises(StalledError, match=r"4 groups in a row failed.*KeyError: 'no such tool'"):
            await leader.feed()
        await leader.settled()
    assert events(tmp_path, "group_decided") == 4  # 2 * rollout.batch_size, each with its reason


async def test_groups_that_the_filter_always_drops_end_the_run_with_the_ways_out(tmp_path: Path, writer: LogWriter):
    pool = WritingPool(writer, versions=[0] * 64)  # every group has the mean outcome 1
    rooms: dict[str, Any] = {
        "algo": {"reward": {"filter_range": (0.0, 1.0)}},
        "admission": {"max_dropped_groups": 6},
        "train": {"batch_size": 2, "num_steps": 20},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 1},
    }
    leader = make_leader(tmp_path, writer, pool, **rooms)
    with pytest.raises(
        StalledError, match=r"max_dropped_groups=6 groups in a row .* mean outcome 1 is not inside .* widen algo\.reward\.filter"
    ):
        async with asyncio.timeout(20):
            await leader.feed()
    await leader.settled()
    assert 6 <= events(tmp_path, "group_decided") <= 9 and len(pool.dispatched) <= 10


@pytest.mark.parametrize(("last_version", "sizes"), [(1, [2, 2, 1]), (0, [2, 2])])
async def test_prompts_end_in_a_short_step_or_a_stale_group_and_then_in_no_plan(
    tmp_path: Path, writer: LogWriter, last_version: int, sizes: list[int]
):
    """Five prompts in steps of two, at most one version old. The last group trains alone, or is two versions old by then and dropped."""
    pool = WritingPool(writer, versions=[0, 0, 0, 0, last_version])
    rooms = {"train": {"batch_size": 2, "num_epochs": 1}, "rollout": {"batch_size": 2, "n_samples_per_prompt": 1}}
    leader = make_leader(tmp_path, writer, pool, num_prompts=5, admission={"max_lag": 1}, **rooms)
    plans: list[StepPlan] = []
    async with asyncio.timeout(30):
        async with alongside(leader.feed()):
            for step in range(4):
                plan = await leader.next_plan(step, num_ranks=1, is_stopped=lambda: False, meanwhile=nothing)
                if plan is None:
                    break
                plans.append(plan)
                leader.serve(step + 1)
                leader.inbox.begin_version()
    await leader.settled()
    assert [plan.num_groups for plan in plans] == sizes and leader.is_exhausted
    trained = [row.group_id for plan in plans for row in plan.segments]
    assert sorted(trained) == sorted(leader.order.place(i).group_id for i in range(sum(sizes)))
    told = LogReader.open(tmp_path / "run").cut().table("events", ["body"], where="kind = 'group_decided'")["body"].to_pylist()
    decisions = Counter(json.loads(body)["decision"] for body in told)
    assert decisions == ({"admitted": 5} if last_version else {"admitted": 4, "stale": 1})


@pytest.mark.parametrize(("num_prompts", "seed"), [(6, 0), (2, 0), (4, 1)])
async def test_run_over_other_prompts_or_in_another_order_is_not_gone_on_with(
    tmp_path: Path, writer: LogWriter, num_prompts: int, seed: int
):
    """Of four prompts three were sent. Under another number or seed their places are others': one would be skipped, one sent twice."""
    first = make_leader(tmp_path, writer, ScriptedPool(), num_prompts=4)
    places = [first.order.place(position) for position in range(3)]
    sent = [
        event(
            "group_dispatched", group_id=place.group_id, policy_version=0, epoch=place.epoch, order_index=place.order_index,
            prompt_index=place.prompt_index, prompt_id=first.prompts[place.prompt_index].prompt_id, group_size=2, members=[0, 1],
            purpose="train",
        )
        for place in places
    ]  # fmt: skip
    await first.producer.append(events=sent)
    assert make_leader(tmp_path, writer, ScriptedPool(), num_prompts=4).read_standing(from_step=0).position == 3
    later = make_leader(tmp_path, writer, ScriptedPool(), num_prompts=num_prompts, run={"seed": seed})
    with pytest.raises(DataError, match=r"data.prompt_dataset: group e0-p\d was sent as prompt .*the run.seed that the run began with"):
        later.read_standing(from_step=0)


async def test_decision_on_its_way_at_the_end_of_a_run_reaches_the_log(tmp_path: Path, writer: LogWriter):
    """The last group is filtered and the run ends before the log has said that it knows: nothing told later may be lost for that."""
    pool = WritingPool(writer, versions=[0])
    rooms = {"train": {"batch_size": 1, "num_epochs": 1}, "rollout": {"batch_size": 1, "n_samples_per_prompt": 1}}
    leader = make_leader(tmp_path, writer, pool, num_prompts=1, algo={"reward": {"filter_range": (0.0, 1.0)}}, **rooms)
    leader.producer = Producer(SlowSink(writer, 0.5), "driver")
    async with asyncio.timeout(20):
        async with alongside(leader.feed()):
            while not leader.is_exhausted:
                await asyncio.sleep(0.01)
        await leader.settled()
        await leader.producer.append(events=[event("attempt_ended", reason="finished", error=None, num_steps=0)])
    assert (events(tmp_path, "group_decided"), events(tmp_path, "attempt_ended")) == (1, 1)


async def test_steps_that_are_refused_one_after_the_other_end_the_run(tmp_path: Path, writer: LogWriter):
    leader = make_leader(tmp_path, writer, ScriptedPool())
    refusal = Refusal(reason=RefusalReason.LINEAGE, error="segment e0-p0/0/0/0 has tokens of versions 0 and 1")
    for step in range(MAX_REFUSED):
        plan = plan_step([], step=step, policy_version=0, seed=0, num_ranks=1, micro_batch_tokens=64, cursor=0)
        refused = StepResult(
            step=step, policy_version=0, loss=0.0, grad_norm=0.0, learning_rate=0.0, n_sampled=0, n_kept=0, reward_mean=None, kl_mean=None,
            entropy_mean=None, batch_digest="", loss_digest="", weights_digest=None, refused=refusal,
        )  # fmt: skip
        if step < MAX_REFUSED - 1:
            leader.record(plan, refused, wait_s=0.0)
        else:
            with pytest.raises(StalledError, match=r"8 steps in a row were refused.*versions 0 and 1"):
                leader.record(plan, refused, wait_s=0.0)
    await leader.settled()
    assert events(tmp_path, "step_refused") == MAX_REFUSED


async def test_run_goes_on_after_more_refused_steps_than_the_lag_bound_counts(tmp_path: Path, writer: LogWriter):
    """Steps 1 and 3 of five are refused and bring no version: their groups must leave room for others, strictly on-policy."""
    pool = WritingPool(writer, versions=[0, 1, 1, 2, 2])
    rooms = {"train": {"batch_size": 1, "num_steps": 5}, "rollout": {"batch_size": 1, "n_samples_per_prompt": 1}}
    leader = make_leader(tmp_path, writer, pool, admission={"max_lag": 0}, **rooms)
    clock = VersionClock.of(leader.config)
    async with asyncio.timeout(20), alongside(leader.feed()):
        for step in range(5):
            plan = await leader.next_plan(step, num_ranks=1, is_stopped=lambda: False, meanwhile=nothing)
            assert plan is not None and plan.num_groups == 1 and plan.policy_version == clock.version
            if clock.tick(is_trained=step not in (1, 3)):
                leader.serve(clock.version)
            leader.inbox.begin_version(num_since=clock.num_planned)
    assert clock.version == 3
    await leader.settled()


def test_weights_of_a_version_that_was_cut_short_are_a_version_of_their_own():
    """Two steps a version, three steps made: the last weights are not those of version 1. A plan under a later version tells it."""
    clock = VersionClock(steps_per_version=2)
    assert [clock.tick(is_trained=True) for _ in range(3)] == [False, True, False]
    assert (clock.version, clock.weights_version, clock.is_boundary) == (1, 2, False)
    resumed = VersionClock(steps_per_version=2, version=2)  # from the checkpoint after step 3
    assert [resumed.tick(is_trained=True) for _ in range(2)] == [False, True] and resumed.version == 3
    older = VersionClock(steps_per_version=2, version=1)  # from the one after step 2, as the later one is damaged
    older.follow(1)
    older.tick(is_trained=True)
    older.follow(2)  # what the log says of step 3
    assert [older.tick(is_trained=True) for _ in range(2)] == [False, True] and older.version == 3
