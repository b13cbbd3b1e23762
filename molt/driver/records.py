"""What an attempt writes down: its steps, checkpoints with their log position, the exported model, how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol

from molt.admission.plan import StepPlan
from molt.config import Config
from molt.driver.house import House
from molt.driver.leader import Leader
from molt.driver.refit import publish
from molt.errors import MoltError
from molt.learn.result import StepResult
from molt.log.rows import event
from molt.rollout.engine import WeightSource

END_S = 30.0
"""Seconds that a failed attempt takes at most to say so in its log."""


class Listener(Protocol):
    """Who is told what happens."""

    def note(self, text: str) -> None:
        """Say one line."""
        ...


async def record_step(
    house: House, leader: Leader, plan: StepPlan, result: StepResult, *, wait_s: float, version: int | None
) -> WeightSource | None:
    """Write down what a step did while its weights are made ready as a version: the plan is there first, then scores and gate
    decisions, then the step.

    version: None where the engines get no new weights. Returns where the weights are; they may travel while the log still takes the
    step, and leader.settled() says when they may be sampled with.
    """
    await leader.hold()
    result = replace(result, log_s=result.log_s + leader.log_s)
    leader.log_s = 0.0
    leader.announce(plan.step + 1, plan.policy_version if version is None else version, num_ranks=len(plan.micro_batches))
    house.ranks.release()

    async def write() -> None:
        await house.ranks.settle()
        leader.record(plan, result, wait_s=wait_s)

    leader.follow(write())
    if version is not None:
        return await publish(house, version)
    await leader.hold()
    return None


def is_save_due(config: Config, *, step: int, saved_step: int | None) -> bool:
    """Whether a multiple of ckpt.save_interval was passed since the newest checkpoint: a version need not begin at one."""
    every = config.ckpt.save_interval
    return every > 0 and step // every > (saved_step or 0) // every


async def save_checkpoint(house: House, leader: Leader, *, step: int, policy_version: int, is_final: bool = False) -> None:
    """Write a checkpoint that names its log position, and at the end the model as a Hugging Face folder."""
    if leader.saved_step != step:
        await leader.settled()
        lsn_end = leader.lsn_end
        path, digest = await house.ranks.save(step=step, policy_version=policy_version, cursor=leader.inbox.cursor, lsn_end=lsn_end)
        saved = event(
            "checkpoint_saved",
            step=step,
            policy_version=policy_version,
            path=str(path.relative_to(house.run.path)),
            weights_digest=digest,
            cursor=leader.inbox.cursor,
            lsn_end=lsn_end,
        )
        leader.tell(saved)
        await leader.settled()
        leader.saved_step = step
    if is_final and house.config.ckpt.export:
        await house.ranks.export(house.config.ckpt.output_dir or house.run.checkpoints / "final")


@asynccontextmanager
async def finish(house: House, listener: Listener, leader: Leader) -> AsyncIterator[None]:
    """Append attempt_ended with what ended the attempt: finished, drained, or failed with the first cause."""
    try:
        yield
    except BaseException as error:
        reason = "drained" if isinstance(error, KeyboardInterrupt | asyncio.CancelledError) else "failed"
        text = f"{type(error).__name__}: {error}"
        listener.note(f"the attempt ends: {text}")
        with suppress(MoltError, TimeoutError):
            async with asyncio.timeout(END_S):
                with suppress(Exception):  # what keeps a fact out of the log now follows from the first cause, or is it
                    await leader.settled()
                await _say_ended(house, leader, reason, text)
        raise
    await leader.settled()
    await _say_ended(house, leader, "drained" if leader.is_stopped else "finished", None)


async def _say_ended(house: House, leader: Leader, reason: str, error: str | None) -> None:
    await house.producer.append(events=[event("attempt_ended", reason=reason, error=error, num_steps=leader.num_recorded)])
