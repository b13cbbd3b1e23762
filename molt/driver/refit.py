"""New weights for the engines, and the event that says so."""

from __future__ import annotations

import json

from molt.driver.house import House
from molt.driver.leader import Leader
from molt.errors import RefitError
from molt.log.rows import event

NUM_TRIES = 2
"""Tries before the run stops; between them the old version serves on."""


async def refit(house: House, leader: Leader, *, policy_version: int, step: int) -> None:
    """Publish the weights as a version and let every engine take them; raises RefitError when none does."""
    source = await house.ranks.publish_weights(policy_version, engines=[engine.name for engine in house.engines])
    for tried in range(1, NUM_TRIES + 1):
        try:
            times = await house.pool.refit(source, step=step, send=house.ranks.sender(source))
            break
        except RefitError:
            if tried == NUM_TRIES:
                raise
    await house.producer.append(
        events=[
            event(
                "weights_refit",
                policy_version=policy_version,
                step=step,
                weights_digest=times.weights_digest,
                engines=json.dumps(times.engines, sort_keys=True),
                pause_s=times.pause_s,
                transfer_s=times.transfer_s,
                verify_s=times.verify_s,
                resume_s=times.resume_s,
                size_bytes=times.size_bytes,
                num_in_flight=times.num_in_flight,
            )
        ]
    )
    leader.serve(policy_version)
