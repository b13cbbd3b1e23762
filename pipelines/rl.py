"""Train a policy: agents roll out into the log, the trainer learns from the log, weights flow back.

Copy this file and edit it: `molt train --pipeline my_rl.py ...` runs the copy.

    prompts --> pool: workers run the agent on engines --> log --> leader: decides, plans --> ranks: read rows, train --> log
                          ^                                                                       |
                          '------------------------------ refit: new weights --------------------'
"""

from __future__ import annotations

import math
import time
from functools import partial

from molt.admission.plan import StepPlan, laid_out
from molt.config import Config
from molt.data.prompts import PromptSet
from molt.driver.changes import changes_since, check_checkpoint
from molt.driver.evaluation import evaluate, evaluate_lost
from molt.driver.house import House, alongside, open_house, say_started
from molt.driver.leader import Leader
from molt.driver.records import finish, is_save_due, record_step, save_checkpoint
from molt.driver.refit import publish, refit, refit_again, refit_newcomers
from molt.driver.versions import VersionClock
from molt.errors import SettingError
from molt.learn.result import StepResult
from molt.runs import RunDir, create_run
from molt.view.panel import Progress
from molt.view.stop import STOPPED_BY_HAND, Stopper


async def main(config: Config, *, resume: RunDir | None = None) -> int:
    """Run all steps, or go on with a run from its newest checkpoint and its log. Returns the exit code."""
    if config.data.prompt_dataset is None:
        raise SettingError("data.prompt_dataset is missing; give a JSONL or Parquet file, or a data set folder, of prompts")
    prompts = PromptSet.load(config.data.prompt_dataset, config.data)
    num_steps = config.train.num_steps or math.ceil(config.train.num_epochs * len(prompts) / config.groups_per_step)
    run = resume or create_run(config)
    with Progress(config, run=run, num_steps=num_steps) as progress, Stopper(progress.note) as stopper:
        async with open_house(config, run, num_steps=num_steps, say=progress.waiting) as house:
            leader = Leader(config, prompts=prompts, house=house, say=progress.waiting)
            async with finish(house, progress, leader):
                step, clock = await take_up(house, leader, progress, num_steps)
                async with alongside(leader.feed()):
                    await evaluate_lost(house, leader, step=step, policy_version=clock.version)
                    while step < num_steps and not stopper.is_draining:
                        began = time.monotonic()
                        plan = await leader.next_plan(
                            step,
                            num_ranks=config.fsdp.num_shards,
                            is_stopped=lambda: stopper.is_draining,
                            meanwhile=partial(refit_newcomers, house, leader, step=step - 1),
                        )
                        if plan is None:
                            break
                        await train_step(house, leader, progress, plan, clock, wait_s=time.monotonic() - began)
                        step += 1
                        if config.eval.interval and step % config.eval.interval == 0:
                            await evaluate(house, leader, step=step, policy_version=clock.version)
                        if clock.is_boundary and is_save_due(config, step=step, saved_step=leader.saved_step):
                            await save_checkpoint(house, leader, step=step, policy_version=clock.version)
                    leader.is_stopped = stopper.is_draining and step < num_steps
                    progress.waiting("rollouts in flight to end")
                    await leader.drain()
                progress.waiting("the last checkpoint")
                await save_checkpoint(house, leader, step=step, policy_version=clock.weights_version, is_final=True)
    return STOPPED_BY_HAND if leader.is_stopped else 0


async def take_up(house: House, leader: Leader, progress: Progress, num_steps: int) -> tuple[int, VersionClock]:
    """Stand where the log says that the run stands: load the newest checkpoint, train again what was planned after it, refit, and
    send what was in flight once more. Nothing is generated twice. Plans made for other data shards are cut anew. Returns the next step
    and the count of versions."""
    config = house.config
    checkpoint, passed_over = await house.ranks.newest_checkpoint()
    for words in passed_over:
        progress.note(words)
    position = None if checkpoint is None else await house.ranks.load(checkpoint)
    if position is not None and checkpoint is not None:
        check_checkpoint(house.reader, checkpoint, position)
    step = 0 if position is None else position.step
    leader.saved_step = None if position is None else step
    clock = VersionClock.of(config, 0 if position is None else position.policy_version)
    standing = leader.read_standing(from_step=step)
    is_resumed = house.attempt > 1
    changes = changes_since(house.reader, config, num_steps=num_steps, pipeline=__file__)
    await say_started(
        house,
        model_digest=house.engines[0].weights_digest,
        num_steps=num_steps,
        resumed_from_step=step if is_resumed else None,
        checkpoint=checkpoint,
        pipeline=__file__,
    )
    tokens = config.train.micro_batch_tokens
    plans = [laid_out(plan, num_ranks=config.fsdp.num_shards, micro_batch_tokens=tokens) for plan in standing.plans]
    num_replanned = sum(new != old for new, old in zip(plans, standing.plans, strict=True))
    if changes is not None and changes.is_worth_telling(num_replanned=num_replanned):
        leader.tell(changes.told(from_step=step, num_replanned=num_replanned))
        progress.note(changes.line(from_step=step, num_replanned=num_replanned))
    await house.pool.sleep()
    for plan in plans:
        progress.waiting(f"training step {plan.step} again from the log")
        clock.follow(plan.policy_version)
        leader.policy_version = clock.version
        leader.write_plan(plan)
        await train_step(house, leader, progress, plan, clock, wait_s=0.0, is_serving=False)
        step = plan.step + 1
    clock.follow(clock.weights_version)  # killed inside a version: its own weights are gone, these are other ones
    await house.pool.wake(is_refit_next=True)
    await refit(house, leader, await publish(house, clock.version), step=step - 1)
    leader.inbox.begin_version(num_since=clock.num_planned * config.groups_per_step)
    await leader.redispatch(standing.open_members)
    return step, clock


async def train_step(
    house: House, leader: Leader, progress: Progress, plan: StepPlan, clock: VersionClock, *, wait_s: float, is_serving: bool = True
) -> StepResult:
    """Train one plan, record it, and give the engines new weights when a version is complete. Engines that can sleep do so meanwhile."""
    progress.waiting(f"training step {plan.step}")
    if is_serving:
        await house.pool.sleep()
    result = await house.ranks.train(plan, waits_for_log=False)
    is_due = clock.tick(is_trained=result.refused is None) and is_serving
    weights = await record_step(house, leader, plan, result, wait_s=wait_s, version=clock.version if is_due else None)
    if is_serving:
        forgets = house.config.vllm.sleep_level == 2
        await house.pool.wake(is_refit_next=is_due or forgets)
        if weights is not None:
            progress.waiting(f"refit to version {clock.version}")
            await refit(house, leader, weights, step=plan.step)
        elif forgets:
            await refit_again(house, leader, step=plan.step)
    leader.inbox.begin_version(num_since=clock.num_planned * house.config.groups_per_step)
    progress.step(leader.figures(plan, result, wait_s=wait_s))
    return result
