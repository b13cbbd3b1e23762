"""An evaluation that its attempt ended without is made by the next one, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from molt.driver.evaluation import evaluate_lost
from molt.driver.house import alongside
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
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
