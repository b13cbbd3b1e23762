"""Graders in processes: a hung one is killed at its limit, replaced, and never a reward of 0."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from molt.agents.verifier import VerdictKind, Verifier
from molt.errors import AgentError
from tests.agents.graders import double, misbehave


@pytest.fixture
async def verifier() -> AsyncIterator[Verifier]:
    pool = Verifier(misbehave, num_workers=2, timeout_s=0.4, memory_bytes=2 << 30)
    await pool.start()
    yield pool
    await pool.close()


async def test_good_grader_answers_many_calls_in_one_process() -> None:
    pool = Verifier(double)
    await pool.start()
    try:
        verdicts = [await pool.verify(number) for number in range(20)]
        assert [verdict.value for verdict in verdicts] == list(range(0, 40, 2)) and verdicts[0].unscorable is None
        (process,) = pool._processes
    finally:
        await pool.close()
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("sleep", VerdictKind.TIMEOUT, "verifier timeout: no answer in 0.4 s"),
        ("compute", VerdictKind.TIMEOUT, "verifier timeout"),
        ("memory", VerdictKind.RAISED, "MemoryError"),
        ("die", VerdictKind.DIED, "verifier died"),
        ("die while answering", VerdictKind.DIED, "verifier died"),
        ("nan", VerdictKind.RAISED, "ValueError: the grader returned nan"),
        ("raise", VerdictKind.RAISED, "KeyError: 'no such label'"),
        ("unpicklable", VerdictKind.RAISED, "not JSON serializable"),
    ],
)
async def test_grader_that_cannot_decide_is_unscorable_and_replaced(verifier: Verifier, how: str, kind: VerdictKind, said: str) -> None:
    verdict = await verifier.verify(how)
    assert verdict.kind is kind and verdict.value is None and said in (verdict.unscorable or "")
    assert [(await verifier.verify("fine")).value for _ in range(2)] == ["fine", "fine"]


async def test_what_a_grader_prints_is_not_its_answer(verifier: Verifier) -> None:
    assert (await verifier.verify("print")).value == "fine"


async def test_three_hung_graders_do_not_stop_the_others(verifier: Verifier) -> None:
    await asyncio.gather(verifier.verify("fine"), verifier.verify("fine"))
    start = time.monotonic()
    verdicts = await asyncio.gather(*(verifier.verify(how) for how in ("compute", "sleep", "compute", "fine", "fine")))
    assert [verdict.kind for verdict in verdicts] == [*[VerdictKind.TIMEOUT] * 3, VerdictKind.DONE, VerdictKind.DONE]
    # Two processes, three calls of 0.4 s that are killed: two rounds and the restarts.
    assert time.monotonic() - start < 30 and verifier.num_killed == 3


async def test_cancelled_call_gives_its_place_back(verifier: Verifier) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(verifier.verify("sleep"), 0.2)
    assert (await verifier.verify("fine")).value == "fine"


async def test_function_that_a_process_cannot_import_is_refused() -> None:
    with pytest.raises(AgentError, match="no module-level function"):
        Verifier(lambda: 1 if Path else 2)
    with pytest.raises(AgentError, match="before start"):
        await Verifier(double).verify(1)


async def test_arguments_that_no_process_can_be_told_are_refused_and_cost_none(verifier: Verifier) -> None:
    assert (await verifier.verify("fine")).value == "fine"
    before = set(verifier._processes)
    with pytest.raises(AgentError, match=r"not JSON: str is not valid UTF-8.*half characters"):
        await verifier.verify("\ud83d")
    assert (await verifier.verify("fine")).value == "fine" and before <= verifier._processes


WORKER = """
import asyncio
from molt.agents.verifier import Verifier
from tests.agents.graders import misbehave

async def main():
    pool = Verifier(misbehave, timeout_s=600)
    await pool.start()
    await pool.verify("fine")
    print(next(iter(pool._processes)).pid, flush=True)
    await pool.verify("compute")

asyncio.run(main())
"""


def _ticks(stat: Path) -> int:
    """Time that a process has computed, in ticks of the kernel."""
    return int(stat.read_text().rpartition(")")[2].split()[11])


def test_a_grader_that_computes_without_end_ends_with_a_worker_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        grader = Path(f"/proc/{int(worker.stdout.readline())}/stat")
        busy, until = _ticks(grader), time.monotonic() + 30
        while _ticks(grader) < busy + 20:  # one that waits for a question would end with its input
            assert time.monotonic() < until, "it does not compute"
            time.sleep(0.02)
        worker.kill()
    until = time.monotonic() + 10
    while grader.exists() and " Z " not in grader.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    assert time.monotonic() < until
