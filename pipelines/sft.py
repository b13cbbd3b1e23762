"""Supervised fine-tuning: conversations become rows of the log, ranks learn their assistant turns, an evaluation set watches.

Copy this file and edit it: `molt sft --pipeline my_sft.py ...` runs the copy.

    conversations --> template, ids, targets --> log --> plan --> ranks: read rows, train --> log --> checkpoint, export
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from molt.admission.order import PromptOrder
from molt.admission.plan import StepPlan, plan_digest, plan_to_json
from molt.config import Config
from molt.driver.changes import changes_since, check_checkpoint
from molt.driver.house import ray_session, say_started
from molt.driver.leader import MAX_REFUSED, consumption, step_trained
from molt.errors import SettingError, StalledError
from molt.learn.demonstrations import HELD_ALIKE, Demonstrations, not_yet_held, places_of_step, plan_of
from molt.learn.ranks import RankGroup
from molt.log.actor import RaySink, start_log_actor, stop_log_actor
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import event
from molt.runs import RunDir, create_run
from molt.view.panel import Progress
from molt.view.stop import STOPPED_BY_HAND, Stopper

ROWS_PER_MESSAGE = 256


@dataclass(slots=True, kw_only=True)
class School:
    """What one attempt holds: the log, the ranks, the conversations."""

    config: Config
    run: RunDir
    producer: Producer
    reader: LogReader
    ranks: RankGroup
    train: Demonstrations
    held_out: Demonstrations | None
    num_steps: int
    cursor: int = -1
    """Largest lsn of supervised rows."""
    lsn_end: int = -1
    """Largest lsn when the newest step was recorded."""
    num_recorded: int = 0
    num_refused_in_row: int = 0
    saved_step: int | None = None
    """Step of the newest checkpoint."""


async def main(config: Config, *, resume: RunDir | None = None) -> int:
    """Run all steps, or go on with a run from its newest checkpoint. Returns the exit code."""
    train, held_out, num_steps = load(config)
    run = resume or create_run(config)
    with Progress(config, run=run, num_steps=num_steps) as progress, Stopper(progress.note) as stopper:
        async with open_school(config, run, train, held_out, num_steps, progress) as school:
            step = await take_up(school, progress, is_resumed=resume is not None)
            if step == 0 and config.eval.interval:
                await evaluate(school, progress, step=0)
            while step < num_steps and not stopper.is_draining:
                progress.waiting(f"training step {step}")
                await train_step(school, progress, step)
                step += 1
                if config.eval.interval and (step % config.eval.interval == 0 or step == num_steps):
                    await evaluate(school, progress, step=step)
                if config.ckpt.save_interval and step % config.ckpt.save_interval == 0 and step < num_steps:
                    await save_checkpoint(school, step)
            await save_checkpoint(school, step)
            if config.ckpt.export:
                progress.waiting("exporting the model")
                await school.ranks.export(config.ckpt.output_dir or run.checkpoints / "final")
            is_stopped = stopper.is_draining and step < num_steps
            reason = "drained" if is_stopped else "finished"
            await school.producer.append(events=[event("attempt_ended", reason=reason, error=None, num_steps=school.num_recorded)])
    return STOPPED_BY_HAND if is_stopped else 0


def load(config: Config) -> tuple[Demonstrations, Demonstrations | None, int]:
    """The conversations, and the number of steps that they make. SettingError or DataError names what is wrong."""
    if config.sft.dataset is None:
        raise SettingError("sft.dataset is missing; give a JSONL or Parquet file, or a data set folder, whose rows have messages")
    if config.actor.model_name_or_path is None:
        raise SettingError("actor.model_name_or_path is missing; give a folder with a Hugging Face model and its tokenizer")
    train = Demonstrations.load(config.sft.dataset, config)
    held_out = None
    if config.data.eval_dataset is not None:
        held_out = Demonstrations.load(config.data.eval_dataset, config, setting="data.eval_dataset", prefix="sft-eval")
    elif config.eval.interval:
        raise SettingError(f"eval.interval={config.eval.interval} needs data.eval_dataset; give conversations or set it to 0")
    return train, held_out, config.train.num_steps or math.ceil(config.train.num_epochs * len(train) / config.sft.batch_size)


@asynccontextmanager
async def open_school(
    config: Config, run: RunDir, train: Demonstrations, held_out: Demonstrations | None, num_steps: int, progress: Progress
) -> AsyncIterator[School]:
    """Start log writer and ranks; on leaving stop them in reverse. A failure is written as the end of the attempt."""
    with ray_session(config):
        attempt = run.begin_attempt()
        progress.waiting("starting the log writer")
        log = start_log_actor(run.path, run=run.name, attempt=attempt, store=config.log.store)
        try:
            producer = Producer(RaySink(log), f"sft-{attempt}")
            progress.waiting("starting trainer ranks")
            ranks = await RankGroup.start(
                config, run_dir=run.path, run=run.name, attempt=attempt, log=log, num_steps=num_steps, objective="supervised"
            )
            school = School(
                config=config,
                run=run,
                producer=producer,
                reader=LogReader.open(run.path),
                ranks=ranks,
                train=train,
                held_out=held_out,
                num_steps=num_steps,
            )
            try:
                yield school
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                await producer.append(events=[event("attempt_ended", reason="failed", error=text, num_steps=school.num_recorded)])
                raise
            finally:
                await ranks.stop()
        finally:
            stop_log_actor(log)


async def take_up(school: School, progress: Progress, *, is_resumed: bool) -> int:
    """Load the newest checkpoint, and append the conversations that the log does not hold yet. Returns the next step."""
    checkpoint, passed_over = await school.ranks.newest_checkpoint() if is_resumed else (None, [])
    for words in passed_over:
        progress.note(words)
    initial_digest = await school.ranks.weights_digest()
    position = None if checkpoint is None else await school.ranks.load(checkpoint)
    if position is not None and checkpoint is not None:
        check_checkpoint(school.reader, checkpoint, position)
    school.saved_step = None if position is None else position.step
    step = school.saved_step or 0
    changes = changes_since(school.reader, school.config, num_steps=school.num_steps, pipeline=__file__)
    if changes is not None and "sft.batch_size" in changes.changed and step > 0:
        before, now = changes.changed["sft.batch_size"]
        raise SettingError(
            f"sft.batch_size={now} with --resume, but the {step} steps made took {before} conversations each: some would be left out, or "
            f"come twice; go on with {before}, or begin a new run from the exported model"
        )
    await say_started(
        school,
        model_digest=initial_digest,
        num_steps=school.num_steps,
        resumed_from_step=step if is_resumed else None,
        checkpoint=checkpoint,
        pipeline=__file__,
    )
    if changes is not None and changes.is_worth_telling(num_replanned=0):
        await school.producer.append(events=[changes.told(from_step=step, num_replanned=0)])
        progress.note(changes.line(from_step=step, num_replanned=0))
    progress.waiting("writing the conversations to the log")
    told = [segment for part in (school.train, school.held_out) if part is not None for segment in part.segments]
    rows = not_yet_held(told, school.reader.cut().table("segments", ["segment_id", *HELD_ALIKE]).to_pylist())
    for start in range(0, len(rows), ROWS_PER_MESSAGE):
        await school.producer.append(segments=rows[start : start + ROWS_PER_MESSAGE])
    school.cursor = max(school.reader.cut().table("segments", ["lsn"])["lsn"].to_pylist())
    return step


async def train_step(school: School, progress: Progress, step: int) -> None:
    """Plan, train and record one step."""
    config = school.config
    order = PromptOrder(num_prompts=len(school.train), seed=config.run.seed)
    num_passes = config.train.num_epochs if config.train.num_steps is None else None
    places = places_of_step(order, step, config.sft.batch_size, num_passes=num_passes)
    plan = plan_for(school, school.train, [place for place, _ in places], step)
    text = plan_to_json(plan)
    planned = event(
        "batch_planned",
        step=step,
        policy_version=step,
        plan=text,
        plan_digest=plan_digest(text),
        groups=[row.group_id for row in plan.segments],
        num_segments=len(plan.segments),
        num_rollouts=plan.num_rollouts,
        n_sampled=plan.n_sampled,
        seed=plan.seed,
        cursor=plan.cursor,
    )
    await school.producer.append(events=[planned])
    result = await school.ranks.train(plan)
    school.num_recorded += 1
    if result.refused is not None:
        what = {"reason": result.refused.reason.value, "error": result.refused.error, "n_sampled": plan.n_sampled}
        ack = await school.producer.append(events=[event("step_refused", step=step, policy_version=step, **what)])
        school.num_refused_in_row += 1
        if school.num_refused_in_row >= MAX_REFUSED:
            raise StalledError(f"{MAX_REFUSED} steps in a row were refused and nothing is learned; the last: {result.refused.error}")
    else:
        school.num_refused_in_row = 0
        passes = {school.train.segments[place].segment_id: number for place, number in places}
        used = [replace(row, use_number=passes[row.segment_id] + 1) for row in consumption(plan, result)]
        ack = await school.producer.append(events=[step_trained(result, wait_s=0.0)], consumption=used)
    school.lsn_end = ack.lsn_end
    progress.step(
        {
            "step": step,
            "version": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "n_sampled": plan.n_sampled,
            "n_kept": result.n_kept,
            "train_s": result.train_s,
            "log_s": result.log_s,
            "refused": None if result.refused is None else result.refused.reason.value,
        }
    )


async def evaluate(school: School, progress: Progress, *, step: int) -> None:
    """Mean negative log-prob over the held-out conversations, as an event."""
    assert school.held_out is not None, "load has checked it"
    progress.waiting(f"evaluating after {step} steps")
    loss = await school.ranks.evaluate(plan_for(school, school.held_out, range(len(school.held_out)), step))
    progress.note(f"step {step}: held-out loss {loss:.4f}")
    evaluated = event(
        "evaluated",
        step=step,
        policy_version=step,
        dataset=str(Path(str(school.config.data.eval_dataset))),
        num_rollouts=len(school.held_out),
        num_failed=0,
        weights_digest=await school.ranks.weights_digest(),
        loss_mean=loss,
    )
    await school.producer.append(events=[evaluated])


async def save_checkpoint(school: School, step: int) -> None:
    """Write a checkpoint with its place in the log, unless that step has one."""
    if school.saved_step == step:
        return
    path, digest = await school.ranks.save(step=step, policy_version=step, cursor=school.cursor, lsn_end=school.lsn_end)
    saved = event(
        "checkpoint_saved",
        step=step,
        policy_version=step,
        path=str(path.relative_to(school.run.path)),
        weights_digest=digest,
        cursor=school.cursor,
        lsn_end=school.lsn_end,
    )
    await school.producer.append(events=[saved])
    school.saved_step = step


def plan_for(school: School, conversations: Demonstrations, places: range | list[int], step: int) -> StepPlan:
    """The plan that trains or evaluates those conversations."""
    return plan_of(
        [conversations.segments[place] for place in places],
        step=step,
        seed=school.config.run.seed,
        cursor=school.cursor,
        num_ranks=school.config.fsdp.num_shards,
        micro_batch_tokens=school.config.train.micro_batch_tokens,
        policy_version=step,
    )
