"""How an attempt ends and what it leaves: checkpoints with their log position, the exported model, attempt_ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from molt.driver.house import House
from molt.driver.leader import Leader
from molt.errors import LogError, MoltError
from molt.log.rows import event


class Listener(Protocol):
    """Who is told what happens."""

    def note(self, text: str) -> None:
        """Say one line."""
        ...


async def save_checkpoint(house: House, leader: Leader, *, step: int, policy_version: int, is_final: bool = False) -> None:
    """Write a checkpoint that names its log position, and at the end the model as a Hugging Face folder."""
    if leader.saved_step != step:
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
        await house.producer.append(events=[saved])
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
        with suppress(LogError, MoltError, TimeoutError):
            await asyncio.wait_for(_say_ended(house, leader, reason, text), 30.0)
        raise
    await _say_ended(house, leader, "drained" if leader.is_stopped else "finished", None)


async def _say_ended(house: House, leader: Leader, reason: str, error: str | None) -> None:
    await house.producer.append(events=[event("attempt_ended", reason=reason, error=error, num_steps=leader.num_recorded)])
