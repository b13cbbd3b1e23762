"""An evaluation in the loop: prompts of the evaluation set through the same agents, scored, never trained."""

from __future__ import annotations

import asyncio
import json
import math
import time

from molt.data.prompts import PromptSet
from molt.driver.house import House
from molt.driver.leader import Leader
from molt.driver.refit import refit_newcomers
from molt.errors import StalledError
from molt.log.rows import event
from molt.rollout.tasks import GroupTask


async def evaluate_lost(house: House, leader: Leader, *, step: int, policy_version: int) -> None:
    """Evaluate at the step that a run goes on from, where one is due there and the attempt before ended without it."""
    every = house.config.eval.interval
    if not every or step == 0 or step % every:
        return
    told = house.reader.cut().table("events", ["body"], where="kind = 'evaluated'")["body"].to_pylist()
    if all(json.loads(body)["step"] != step for body in told):
        await evaluate(house, leader, step=step, policy_version=policy_version)


async def evaluate(house: House, leader: Leader, *, step: int, policy_version: int) -> float | None:
    """Roll out the evaluation prompts on the weights that the engines serve and append `evaluated`; returns the mean reward."""
    config = house.config
    assert config.data.eval_dataset is not None, "eval.interval without data.eval_dataset passed the checks"
    prompts = PromptSet.load(config.data.eval_dataset, config.data)
    size = config.eval.n_samples_per_prompt
    tasks = [
        GroupTask(
            group_id=f"eval{step}.{house.attempt}-p{index}",
            epoch=0,
            order_index=index,
            prompt=prompts[index],
            group_size=size,
            members=tuple(range(size)),
            purpose="eval",
            temperature=config.eval.temperature,
        )
        for index in range(min(len(prompts), config.eval.max_prompts or len(prompts)))
    ]
    await house.pool.dispatch(*tasks)
    await _ended(house, leader, len(tasks), step=step)
    groups, leader.evaluated = leader.evaluated, []
    finished = [done.reward for group in groups for done in group.done]
    rewards = [reward for reward in finished if reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    leader.tell(
        event(
            "evaluated",
            step=step,
            policy_version=policy_version,
            dataset=config.data.eval_dataset,
            num_rollouts=len(rewards),
            num_unscored=len(finished) - len(rewards),
            num_failed=sum(len(group.failed) for group in groups),
            reward_mean=mean,
            reward_ci95=half_width(rewards),
            weights_digest=house.ranks.published_digest,
        )
    )
    return mean


async def _ended(house: House, leader: Leader, num_groups: int, *, step: int) -> None:
    """Return once all groups ended, however many there are; StalledError when none ended for train.step_timeout_s."""
    limit_s, num_ended, moved = house.config.train.step_timeout_s, 0, time.monotonic()
    while len(leader.evaluated) < num_groups:
        if len(leader.evaluated) > num_ended:
            num_ended, moved = len(leader.evaluated), time.monotonic()
        if time.monotonic() - moved > limit_s:
            said = f"{num_ended} of {num_groups} groups ended; {house.pool.describe()}"
            told = event("wait_ended_badly", what=f"evaluation at step {step}", who="driver", limit_s=limit_s, detail=said)
            await leader.producer.append(events=[told])
            raise StalledError(
                f"train.step_timeout_s={limit_s:g} passed without the end of a group of the evaluation at step {step}: {said}"
            )
        await refit_newcomers(house, leader, step=step - 1)
        await asyncio.sleep(0.05)


def half_width(values: list[float]) -> float | None:
    """Half width of the normal 95 % interval of the mean, from the sample deviation; None below two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return 1.96 * math.sqrt(variance / len(values))
