"""A rollout worker in this process, over a real log: what it says of a rollout that the driver cancels late."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from molt.agents.tokenizer import Tokenizer
from molt.config import Config
from molt.data.prompts import Prompt
from molt.data.tiny import make_model
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
from molt.rollout.tasks import FailureReason, GroupTask, RolloutDone, RolloutFailed, RolloutTask
from molt.rollout.worker import RolloutWorker
from tests.agents.scripted import ScriptedEngine

AGENT = """
import molt.agents as agents

class Env(agents.Env):
    async def step(self, action):
        return agents.Result(terminated=True, truncated=False, reward=1.0)

class AgentRunner(agents.AgentRunner):
    env = Env
"""


def task(number: int) -> RolloutTask:
    prompt = Prompt(prompt_id=f"id{number}", prompt_index=number, messages=({"role": "user", "content": "1+1"},), label="2")
    group = GroupTask(group_id=f"e0-p{number}", epoch=0, order_index=number, prompt=prompt, group_size=1, members=(0,), first_try=0)
    return RolloutTask(group=group, member=0, try_number=0, engine="e0")


async def test_a_rollout_that_ended_while_its_answer_was_on_the_way_is_no_cancelled_one(tmp_path: Path) -> None:
    """The driver stopped waiting after the rows were in the log: what it is told then must not contradict them."""
    make_model(tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    config = Config.model_validate(
        {
            "actor": {"model_name_or_path": str(tmp_path / "model")},
            "train": {"agent_path": str(tmp_path / "agent.py")},
            "rollout": {"max_concurrency": 2, "max_new_tokens": 8},
            "data": {"max_len": 64},
        }
    )
    engine = ScriptedEngine(Tokenizer.load(str(tmp_path / "model")), "2")

    async def never(prompt_ids: Any) -> Any:
        await asyncio.sleep(60)

    hanging = ScriptedEngine(engine.tokenizer, never)
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process") as writer:
        worker = RolloutWorker("w", config, sink=writer)
        await worker.start()
        await worker.meet("e0", engine)
        await worker.meet("e1", hanging)
        done = [await worker.run(task(number)) for number in range(3)]
        told = [await worker.cancel(f"e0-p{number}/0/0") for number in range(3)]
        running = asyncio.create_task(worker.run(replace(task(3), engine="e1")))
        while not hanging.prompts:
            await asyncio.sleep(0.001)
        cut = await worker.cancel("e0-p3/0/0")
        assert await running == cut
    assert all(isinstance(outcome, RolloutDone) for outcome in done)
    assert told == [None, *done[1:]]  # as many as can be under way at once are remembered
    assert isinstance(cut, RolloutFailed) and cut.reason is FailureReason.CANCELLED
    assert LogReader.open(tmp_path / "run").cut().table("segments", ["lsn"]).num_rows == 3
