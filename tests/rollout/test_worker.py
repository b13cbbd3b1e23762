"""A rollout worker in this process, over a real log: what it says of rollouts that were cut, and of what they sampled."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from molt.agents.tokenizer import Tokenizer
from molt.config import Config
from molt.data.prompts import Prompt
from molt.data.tiny import make_model
from molt.errors import EngineError
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
from molt.rollout import worker as worker_module
from molt.rollout.engine import FinishReason, Generation
from molt.rollout.tasks import FailureReason, GroupTask, RolloutDone, RolloutFailed, RolloutTask, shortened
from molt.rollout.worker import RolloutWorker
from tests.agents.scripted import ScriptedEngine, generation

AGENT = """
import asyncio
import molt.agents as agents

class AgentRunner(agents.AgentRunner):
    async def run(self, prompt, model):
        if prompt.label == "gives up":
            call = asyncio.ensure_future(model.generate(prompt.messages))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.wait([call])
        await model.generate(prompt.messages)
        return agents.Result(terminated=True, truncated=False, reward=1.0)

    async def cut(self, prompt, reason, earned):
        return None
"""


@dataclass(slots=True, kw_only=True)
class Rig:
    """One worker and its log."""

    worker: RolloutWorker
    tokenizer: Tokenizer
    folder: Path

    async def engine(self, name: str, *script: Any) -> ScriptedEngine:
        """An engine that the worker knows."""
        engine = ScriptedEngine(self.tokenizer, *script)
        await self.worker.meet(name, engine)
        return engine

    def rows(self, table: str, columns: list[str]) -> list[dict[str, Any]]:
        return LogReader.open(self.folder / "run").cut().table(table, columns).to_pylist()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    make_model(tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    config = Config.model_validate(
        {
            "actor": {"model_name_or_path": str(tmp_path / "model")},
            "train": {"agent_path": str(tmp_path / "agent.py")},
            "rollout": {"max_concurrency": 2, "max_new_tokens": 8, "timeout_s": 0.5},
            "data": {"max_len": 64},
        }
    )
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process") as writer:
        worker = RolloutWorker("w", config, sink=writer)
        await worker.start()
        yield Rig(worker=worker, tokenizer=Tokenizer.load(str(tmp_path / "model")), folder=tmp_path)


def task(number: int, label: str = "2", engine: str = "e0") -> RolloutTask:
    prompt = Prompt(prompt_id=f"id{number}", prompt_index=number, messages=({"role": "user", "content": "1+1"},), label=label)
    group = GroupTask(group_id=f"e0-p{number}", epoch=0, order_index=number, prompt=prompt, group_size=1, members=(0,), first_try=0)
    return RolloutTask(group=group, member=0, try_number=0, engine=engine)


async def test_a_rollout_that_ended_while_its_answer_was_on_the_way_is_no_cancelled_one(rig: Rig) -> None:
    """The driver stopped waiting after the rows were in the log: what it is told then must not contradict them."""

    async def never(prompt_ids: Any) -> Any:
        await asyncio.sleep(60)

    await rig.engine("e0", "2")
    hanging = await rig.engine("e1", never)
    done = [await rig.worker.run(task(number)) for number in range(3)]
    told = [await rig.worker.cancel(f"e0-p{number}/0/0") for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "_CUT_LIMIT_S", 0.05)
        running = asyncio.create_task(rig.worker.run(task(3, engine="e1")))
        while not hanging.prompts:
            await asyncio.sleep(0.001)
        cut = await rig.worker.cancel("e0-p3/0/0")
        assert await running == cut
    assert all(isinstance(outcome, RolloutDone) for outcome in done)
    assert told == [None, *done[1:]]  # as many as can be under way at once are remembered
    assert isinstance(cut, RolloutFailed) and cut.reason is FailureReason.CANCELLED
    assert len(rig.rows("segments", ["lsn"])) == 3 and not rig.rows("events", ["lsn"])


async def test_what_a_call_had_sampled_when_its_engine_died_is_counted(rig: Rig) -> None:
    async def dies(prompt_ids: Any) -> Generation:
        error = EngineError("the core is gone")
        error.n_sampled = 5
        raise pickle.loads(pickle.dumps(error))  # as it comes from the engine's process

    await rig.engine("e0", dies)
    outcome = await rig.worker.run(task(0))
    assert isinstance(outcome, RolloutFailed) and (outcome.reason, outcome.n_sampled) == (FailureReason.ENGINE_ERROR, 5)


@pytest.mark.parametrize("how", ["cancelled", "agent_timeout", "gives up"])
async def test_what_a_cut_call_has_sampled_is_counted(rig: Rig, how: str) -> None:
    """An engine tells at an abort the 5 tokens that it has; they are in no segment."""

    async def five_when_cut(prompt_ids: Any) -> Generation:
        await engine.cut.wait()
        return generation([7, 7, 7, 7, 7], finish_reason=FinishReason.ABORT)

    engine = await rig.engine("e0", five_when_cut, "2")
    running = asyncio.create_task(rig.worker.run(task(0, how)))
    while how == "cancelled" and not engine.prompts:
        await asyncio.sleep(0.001)
    if how == "cancelled":
        await rig.worker.cancel("e0-p0/0/0")
    outcome = await running
    if isinstance(outcome, RolloutFailed):
        assert (outcome.reason, outcome.n_sampled) == (how, 5)
        return
    assert how == "gives up" and outcome.n_sampled == 2  # "2" and the end of a turn
    (fact,) = rig.rows("events", ["kind", "body"])
    assert fact["kind"] == "calls_cut"
    assert json.loads(fact["body"]) == {"rollout_id": "e0-p0/0/0", "group_id": "e0-p0", "member": 0, "n_sampled": 5}


def test_long_error_keeps_its_beginning_and_its_end() -> None:
    # 1,000 + 9,000 + 1,000 characters: 2,000 stay at each end, 7,000 go
    cut = shortened("a" * 1000 + "b" * 9000 + "c" * 1000)
    assert cut == "a" * 1000 + "b" * 1000 + " ... 7000 characters left out ... " + "b" * 1000 + "c" * 1000
    assert shortened("a" * 4000) == "a" * 4000
