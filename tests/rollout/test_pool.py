"""The pool on real Ray actors, embedded engines and a real log: groups, failures, refits, faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import pytest_asyncio
import torch

from molt.config import Config
from molt.data.prompts import Prompt
from molt.data.tiny import make_model
from molt.errors import RefitError
from molt.log.actor import RaySink, start_log_actor, stop_log_actor
from molt.log.reader import LogReader
from molt.rollout import crew
from molt.rollout.pool import RolloutPool
from molt.rollout.tasks import FailureReason, GroupTask, RolloutTask
from molt.rollout.weights import named_weights, write_weights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LIMIT_S = 60.0

AGENT = """
import asyncio
import os
import molt.agents as agents

class Env(agents.Env):
    async def step(self, action):
        assert AgentRunner.is_started, "a rollout ran before the agent had started"
        label = self.prompt.label
        if label == "raise":
            raise KeyError("no such thing")
        if label == "hang":
            await asyncio.sleep(1000)
        if label == "hold":
            while True:
                try:
                    await asyncio.sleep(1000)
                except BaseException:
                    while True:
                        pass
        if label == "die":
            os._exit(9)
        if label == "turns" and action.turn < 2:
            return agents.Result(terminated=False, truncated=False, observation=agents.Observation.user("go on"))
        return agents.Result(terminated=True, truncated=False, reward=float(len(action.token_ids)))

class AgentRunner(agents.AgentRunner):
    env = Env
    is_started = False

    async def start(self):
        await asyncio.sleep(1.0)
        AgentRunner.is_started = True
"""


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


def settings(folder: Path, model: Path, **rooms: dict[str, object]) -> Config:
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    base: dict[str, dict[str, object]] = {
        "actor": {"model_name_or_path": str(model)},
        "data": {"max_len": 256},
        "rollout": {"n_samples_per_prompt": 2, "max_new_tokens": 24, "timeout_s": 20.0},
        "vllm": {"engine": "embedded", "num_engines": 1, "request_timeout_s": 10.0, "refit_timeout_s": 20.0},
        "train": {"agent_path": str(agent), "batch_size": 2},
    }
    return Config.model_validate({room: {**base.get(room, {}), **rooms.get(room, {})} for room in {*base, *rooms}})


class Rig:
    """A pool and the log behind it."""

    def __init__(self, pool: RolloutPool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder

    def rows(self, table: str, columns: list[str]) -> list[dict[str, object]]:
        found: pa.Table = LogReader.open(self.folder / "run").cut().table(table, columns)
        return found.to_pylist()

    def events(self, kind: str, group_id: str | None = None) -> list[dict[str, object]]:
        bodies = [json.loads(str(row["body"])) for row in self.rows("events", ["kind", "body"]) if row["kind"] == kind]
        return [body for body in bodies if group_id is None or body["group_id"] == group_id]


@asynccontextmanager
async def rig(config: Config, folder: Path, run: str) -> AsyncIterator[Rig]:
    log = start_log_actor(folder / "run", run=run, attempt=1, store="durable")
    pool = RolloutPool(config, sink=RaySink(log), run_dir=folder / "run")
    try:
        await pool.start()
        yield Rig(pool, folder)
    finally:
        await pool.stop()
        stop_log_actor(log)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(session: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One pool of two engines and one worker, for tests that leave it whole."""
    folder = tmp_path_factory.mktemp("shared")
    async with rig(settings(folder, model, vllm={"num_engines": 2}, rollout={"timeout_s": 6.0}), folder, "shared") as r:
        yield r


def group(index: int, label: str = "plain", *, size: int = 2, first_try: int = 0) -> GroupTask:
    prompt = Prompt(prompt_id=f"id{index}", prompt_index=index, messages=({"role": "user", "content": f"{index}+1"},), label=label)
    return GroupTask(
        group_id=f"e0-p{index}", epoch=0, order_index=index, prompt=prompt, group_size=size, members=tuple(range(size)), first_try=first_try
    )


def new_weights(model: Path, folder: Path, version: int):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.0 + 0.1 * version)
    return write_weights(named_weights(loaded), policy_version=version, folder=folder)


async def test_groups_end_with_their_segments_in_the_log(shared: Rig) -> None:
    for index in range(4):
        await shared.pool.dispatch(group(index, "turns" if index == 3 else "plain"))
    ended = [await shared.pool.next(LIMIT_S) for _ in range(4)]
    assert shared.pool.num_groups == 0
    assert {item.group.group_id for item in ended} == {f"e0-p{index}" for index in range(4)}
    rows = shared.rows("segments", ["rollout_id", "n_sampled", "version_min"])
    assert sorted(str(row["rollout_id"]) for row in rows) == sorted(f"e0-p{index}/{member}/0" for index in range(4) for member in (0, 1))
    assert sum(done.n_sampled for item in ended for done in item.done) == sum(int(str(row["n_sampled"])) for row in rows)
    assert {row["version_min"] for row in rows} == {0}
    assert max(done.num_turns for item in ended for done in item.done) == 3
    assert [body["group_id"] for body in shared.events("group_dispatched")] == [f"e0-p{index}" for index in range(4)]


async def test_all_calls_of_a_rollout_go_to_one_engine(shared: Rig) -> None:
    handles = [berth.handle for berth in shared.pool._fleet.serving]
    before = [(await handle.health()).num_sampled for handle in handles]
    await shared.pool.dispatch(group(6, "turns", size=1))
    (done,) = (await shared.pool.next(LIMIT_S)).done
    sampled = [(await handle.health()).num_sampled - was for handle, was in zip(handles, before, strict=True)]
    assert len(handles) == 2 and done.num_turns == 3 and sorted(sampled) == [0, done.n_sampled]


async def test_a_rollout_whose_worker_died_after_its_commit_is_found_in_the_log(shared: Rig) -> None:
    await shared.pool.dispatch(group(5, size=1))
    (done,) = (await shared.pool.next(LIMIT_S)).done
    task = RolloutTask(group=group(5, size=1), member=0, try_number=0, engine=done.engine)
    found = shared.pool._find(task)
    assert found is not None
    assert replace(found, duration_s=0.0) == replace(done, duration_s=0.0)
    assert shared.pool._find(replace(task, try_number=1)) is None


async def test_a_rollout_that_is_in_the_log_did_not_fail_when_the_run_stops_before_its_dead_worker_is_replaced(shared: Rig) -> None:
    class Late:
        """A crew whose worker dies after its commit, and whose next one does not come."""

        async def run(self, task: RolloutTask, engine: Any) -> Any:
            if task.group.group_id == "e0-p7":
                await shared.pool._crew.run(task, engine)
            await asyncio.Event().wait()

        async def cancel(self, task: RolloutTask) -> None:
            return None

    own, crew = shared.pool, cast(Any, Late())
    pool = RolloutPool(own._config, sink=own._sink, fleet=own._fleet, crew=crew, producer_name="late", run_dir=shared.folder / "run")
    await pool.dispatch(group(7, size=1), group(8, size=1))
    async with asyncio.timeout(LIMIT_S):
        while not [row for row in shared.rows("segments", ["rollout_id"]) if row["rollout_id"] == "e0-p7/0/0"]:
            await asyncio.sleep(0.1)
    assert await pool.drain(0.0) == 2
    assert not shared.events("rollout_failed", "e0-p7")
    assert [body["reason"] for body in shared.events("rollout_failed", "e0-p8")] == ["cancelled"]


async def test_an_agent_that_raises_fails_its_rollouts_after_all_tries(shared: Rig) -> None:
    await shared.pool.dispatch(group(10, "raise"))
    ended = await shared.pool.next(LIMIT_S)
    events = shared.events("rollout_failed", "e0-p10")
    assert not ended.done and {item.reason for item in ended.failed} == {FailureReason.AGENT_ERROR}
    assert "KeyError" in ended.failed[0].error
    assert sorted((body["rollout_id"], body["num_tries"], body["is_final"]) for body in events) == [
        ("e0-p10/0/0", 1, False), ("e0-p10/0/1", 2, True), ("e0-p10/1/0", 1, False), ("e0-p10/1/1", 2, True),
    ]  # fmt: skip
    assert all(int(str(body["n_sampled"])) > 0 for body in events)


async def test_an_agent_that_hangs_is_ended_by_its_time_and_others_go_on(shared: Rig) -> None:
    await shared.pool.dispatch(group(20, "hang", size=1))
    await shared.pool.dispatch(group(21))
    first = await shared.pool.next(LIMIT_S)
    second = await shared.pool.next(LIMIT_S)
    assert first.group.group_id == "e0-p21" and len(first.done) == 2
    assert {item.reason for item in second.failed} == {FailureReason.AGENT_TIMEOUT}


async def test_a_refit_that_no_engine_takes_is_an_event_and_the_old_version_serves(shared: Rig, model: Path, tmp_path: Path) -> None:
    source = new_weights(model, tmp_path, 1)
    Path(str(source.path)).write_bytes(b"nothing")
    with pytest.raises(RefitError):
        await shared.pool.refit(source, step=3)
    await shared.pool.dispatch(group(30))
    ended = await shared.pool.next(LIMIT_S)
    assert {done.version_min for done in ended.done} == {0} and shared.pool.policy_version == 0
    assert [(body["policy_version"], body["step"]) for body in shared.events("refit_failed")] == [(1, 3)]


async def test_a_refit_moves_the_version_of_later_tokens(shared: Rig, model: Path, tmp_path: Path) -> None:
    await shared.pool.dispatch(group(40))
    times = await shared.pool.refit(new_weights(model, tmp_path, 1), step=0)
    await shared.pool.dispatch(group(41))
    ended = {item.group.group_id: item for item in [await shared.pool.next(LIMIT_S), await shared.pool.next(LIMIT_S)]}
    assert shared.pool.policy_version == 1
    assert {done.version_min for done in ended["e0-p41"].done} == {1}
    assert set(times.engines.values()) == {times.weights_digest} and len(times.engines) == 2 and not times.failed


async def test_an_agent_that_does_not_await_after_its_time_is_named_and_its_worker_replaced(
    shared: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_LATE_S", 3.0)
    monkeypatch.setattr(crew, "_STANDSTILL_S", 2.0)
    await shared.pool.dispatch(group(45, "hold", size=1))
    (holder,) = (await shared.pool.next(LIMIT_S)).failed
    assert holder.reason is FailureReason.AGENT_TIMEOUT and "held worker-" in holder.error and "agent.py" in holder.error
    waits = shared.events("wait_ended_badly")
    assert [str(wait["what"]) for wait in waits] == ["rollout e0-p45/0/0", "rollout e0-p45/0/1"] and "agent.py" in str(waits[0]["detail"])
    await shared.pool.dispatch(group(47))
    assert len((await shared.pool.next(LIMIT_S)).done) == 2


async def test_a_worker_that_dies_loses_its_rollouts_to_a_new_one(shared: Rig) -> None:
    await shared.pool.dispatch(group(50, "die"))
    ended = await shared.pool.next(LIMIT_S)
    assert {item.reason for item in ended.failed} == {FailureReason.ATTEMPT_LOST}
    # Its worker cannot say what it had sampled; the engine can.
    assert any(int(str(body["n_sampled"])) > 0 for body in shared.events("rollout_failed", "e0-p50"))
    await shared.pool.dispatch(group(51))
    assert len((await shared.pool.next(LIMIT_S)).done) == 2


async def test_a_worker_that_dies_while_it_starts_is_started_again(shared: Rig) -> None:
    import ray

    hired = shared.pool._crew._hire()
    ray.kill(hired.actor)
    await hired.ready
    assert await hired.actor.cancel.remote("none") is None  # it answers
    hired.watching.cancel()
    ray.kill(hired.actor)


async def test_rollouts_wait_until_the_agent_of_a_new_worker_has_started(shared: Rig) -> None:
    await shared.pool.dispatch(group(52, "die"), group(53, "hang"))
    ended = {item.group.group_id: item for item in [await shared.pool.next(LIMIT_S), await shared.pool.next(LIMIT_S)]}
    assert {item.reason for item in ended["e0-p52"].failed} == {FailureReason.ATTEMPT_LOST}
    assert not [body for body in shared.events("rollout_failed") if "before the agent had started" in str(body["error"])]


async def test_a_drain_cancels_what_does_not_end_and_says_so(shared: Rig) -> None:
    await shared.pool.dispatch(group(60, "hang"))
    for _ in range(100):
        await asyncio.sleep(0.05)
        if (await shared.pool._fleet.serving[0].handle.health()).num_sampled and shared.pool.num_members == 2:
            break
    await asyncio.sleep(1.0)
    assert await shared.pool.drain(0.5) == 1
    events = shared.events("rollout_failed", "e0-p60")
    assert shared.pool.num_members == 0
    assert {(body["reason"], body["is_final"]) for body in events} == {("cancelled", False)} and len(events) == 2
    assert all(int(str(body["n_sampled"])) > 0 for body in events)
    shared.pool.reopen()


async def test_members_of_a_group_differ_and_do_not_depend_on_the_number_of_workers(session: None, model: Path, tmp_path: Path) -> None:
    texts = []
    for number, workers in enumerate((1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = settings(folder, model, rollout={"num_workers": workers, "n_samples_per_prompt": 4})
        async with rig(config, folder, f"seeds{number}") as r:
            await r.pool.dispatch(group(0, size=4))
            await r.pool.next(LIMIT_S)
            texts.append({str(row["rollout_id"]): tuple(row["token_ids"]) for row in r.rows("segments", ["rollout_id", "token_ids"])})
    assert len(set(texts[0].values())) == 4
    assert texts[0] == texts[1]


async def test_an_engine_that_hangs_is_noticed_and_its_rollouts_go_elsewhere(session: None, model: Path, tmp_path: Path) -> None:
    vllm = {"num_engines": 2, "request_timeout_s": 3.0}
    rollout = {"max_new_tokens": 200, "n_samples_per_prompt": 8, "timeout_s": 50.0}
    async with rig(settings(tmp_path, model, vllm=vllm, rollout=rollout), tmp_path, "hangs") as r:
        fleet = r.pool._fleet
        pid = (await fleet.berths["embedded-0"].handle.health()).pid
        await r.pool.dispatch(group(0, "turns", size=8))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        ended = await r.pool.next(LIMIT_S)
        events = r.events("rollout_failed")
    assert len(ended.done) == 8 and not ended.failed
    assert events and {body["reason"] for body in events} == {"engine_error"}
    assert all("embedded-0" in str(body["error"]) and not body["is_final"] for body in events)
    assert fleet.berths["embedded-0"].death is not None


async def test_the_only_engine_is_replaced_with_the_newest_weights(session: None, model: Path, tmp_path: Path) -> None:
    async with rig(settings(tmp_path, model, rollout={"max_new_tokens": 200, "timeout_s": 60.0}), tmp_path, "replaced") as r:
        await r.pool.refit(new_weights(model, tmp_path, 1), step=0)
        pid = (await r.pool._fleet.berths["embedded-0"].handle.health()).pid
        await r.pool.dispatch(group(0, "turns"))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        ended = await r.pool.next(LIMIT_S)
    assert {done.engine for done in ended.done} == {"embedded-0+1"} and len(ended.done) == 2
    assert {done.version_min for done in ended.done} == {1}
