"""Ctrl-C: the first drains, the second aborts, both say so; handlers are put back."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from molt.view.stop import Stopper


def wait_for(said: list[str], number: int) -> None:
    for _ in range(500):
        if len(said) >= number:
            return
        time.sleep(0.01)
    raise AssertionError(f"said {said}, wanted {number} lines")


def test_first_signal_drains_and_says_so() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Stopper(said.append) as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(said, 1)
        assert (stopper.is_draining, stopper.is_aborting) == (True, False)
        assert "draining" in said[0]
    assert signal.getsignal(signal.SIGINT) is before


async def test_second_signal_cancels_the_main_task_and_says_so() -> None:
    said: list[str] = []

    async def run() -> None:
        with Stopper(said.append):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)

    task = asyncio.get_running_loop().create_task(run())
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for(said, 2)
    assert sorted(line.split(":")[1].split()[0].strip(",;") for line in said) == ["aborting", "draining"]


def test_signal_without_a_loop_aborts_at_once_the_second_time() -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), Stopper(said.append):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
