"""New weights for the engines, and the event that says so."""

from __future__ import annotations

import json
from collections.abc import Sequence

from molt.driver.house import House
from molt.driver.leader import Leader
from molt.errors import RefitError
from molt.log.rows import event
from molt.rollout.engine import WeightSource

NUM_TRIES = 3
"""Tries before the run stops; between them the old version serves on."""


async def publish(house: House, policy_version: int) -> WeightSource:
    """Make the weights ready for the engines as a version; none has seen them yet."""
    return await house.ranks.publish_weights(policy_version, engines=await house.pool.engines())


async def refit(house: House, leader: Leader, source: WeightSource, *, step: int) -> None:
    """Let every engine take published weights; raises RefitError when none does."""
    await _take(house, leader, source, step=step)


async def refit_again(house: House, leader: Leader, *, step: int) -> None:
    """Let every engine take the version once more that was published last: those that slept at level 2 have dropped it."""
    source = await house.ranks.publish_again(engines=await house.pool.engines())
    await _take(house, leader, source, step=step)


async def refit_newcomers(house: House, leader: Leader, *, step: int) -> None:
    """Give engines that came in place of dead ones the version that the others serve. Nothing happens when there are none."""
    if newcomers := house.pool.newcomers:
        source = await house.ranks.publish_again(engines=newcomers)
        await _take(house, leader, source, step=step, only=newcomers)


async def _take(house: House, leader: Leader, source: WeightSource, *, step: int, only: Sequence[str] | None = None) -> None:
    for tried in range(1, NUM_TRIES + 1):
        try:
            times = await house.pool.refit(
                source,
                step=step,
                send=house.ranks.sender(source),
                only=only,
                allowed=leader.hold,  # what made the weights is in the log before anyone samples with them
            )
            break
        except RefitError:
            if tried == NUM_TRIES:
                raise
            only = None  # whoever lives now: the engines of a broadcast that broke off are being replaced
            source = await house.ranks.publish_again(engines=await house.pool.engines())
    leader.tell(
        event(
            "weights_refit",
            policy_version=source.policy_version,
            step=step,
            weights_digest=times.weights_digest,
            engines=json.dumps(times.engines, sort_keys=True),
            pause_s=times.pause_s,
            transfer_s=times.transfer_s,
            verify_s=times.verify_s,
            resume_s=times.resume_s,
            size_bytes=times.size_bytes,
            num_in_flight=times.num_in_flight,
            caches=list(times.caches),
        )
    )
    leader.serve(source.policy_version)
