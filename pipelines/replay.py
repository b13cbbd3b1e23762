"""Replay a run: the recorded plans and rows through the same trainer code, compared bit by bit, up to the first difference.

span of steps under the same settings --> ranks of that layout: train, compare --> checkpoint --> ranks of the next span
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from molt.admission.plan import StepPlan, plan_digest, plan_from_json
from molt.config import Config
from molt.driver.changes import flat, trainer_settings
from molt.driver.house import ray_session
from molt.errors import DataError, ReplayMismatchError
from molt.learn.ranks import RankGroup
from molt.learn.result import FIGURES, RecordedStep
from molt.log.reader import LogReader
from molt.runs import RunDir
from molt.view.panel import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Steps in a row whose numbers were made under the same settings: those of one attempt, or of several that changed nothing."""

    config: Config
    num_steps: int
    """Length of the schedule."""
    steps: list[tuple[StepPlan, dict[str, Any] | None]] = field(default_factory=list)
    """Plan and step_trained of each step that counts; None for one that was refused."""


async def main(run: RunDir, *, steps: int | None = None) -> dict[str, Any]:
    """Train the recorded steps again from the initial weights. Returns what was compared; raises ReplayMismatchError at a difference,
    naming step, segment and token."""
    record = read_record(LogReader.open(run.path))
    spans = first_steps(record["spans"], steps)
    if not spans:
        raise DataError(f"run {run.name} has no planned step; there is nothing to replay")
    num_steps, carried = sum(len(span.steps) for span in spans), None
    with (
        ray_session(record["config"]),
        Progress(record["config"], run=run, num_steps=num_steps) as progress,
        tempfile.TemporaryDirectory(prefix=f".{run.name}.replay-", dir=run.path.parent) as folder,
    ):
        for number, span in enumerate(spans):
            progress.waiting("starting trainer ranks")
            ranks = await RankGroup.start(span.config, run_dir=run.path, run=run.name, mode="replay", num_steps=span.num_steps)
            try:
                if carried is None:
                    await check_beginning(ranks, span.config, record["model_digest"])
                else:
                    await ranks.load(carried)
                await replay_span(ranks, span, progress)
                ended_with = await ranks.weights_digest()
                if number + 1 < len(spans):
                    end = span.steps[-1][0].step + 1
                    carried, _ = await ranks.save(step=end, policy_version=0, cursor=0, lsn_end=0, root=Path(folder))
            finally:
                await ranks.stop()
    return {
        "run": run.name,
        "num_steps": num_steps,
        "num_compared": sum(trained is not None for span in spans for _, trained in span.steps),
        "num_spans": len(spans),
        "is_equal": True,
        "compared": "batch digest, loss digest, log-probs, advantages, gate weights, weights digest, figures of the steps, bit by bit",
        "weights_digest": ended_with,
    }


async def check_beginning(ranks: RankGroup, config: Config, model_digest: str) -> None:
    """ReplayMismatchError where the model folder no longer holds the weights that the run began with."""
    begun_with = await ranks.weights_digest()
    if begun_with != model_digest:
        raise ReplayMismatchError(
            f"actor.model_name_or_path={config.actor.model_name_or_path} has weights {begun_with}, "
            f"the run began with {model_digest}; give the model that it began with"
        )


async def replay_span(ranks: RankGroup, span: Span, progress: Progress) -> None:
    """Train and compare the steps of one span."""
    for plan, trained in span.steps:
        progress.waiting(f"replaying step {plan.step}")
        recorded = None if trained is None else recorded_step(trained)
        result = await ranks.train(plan, recorded)
        if (result.refused is None) != (trained is not None):
            was = "trained" if trained is not None else "refused"
            now = "trained" if result.refused is None else f"refused ({result.refused.reason}: {result.refused.error})"
            raise ReplayMismatchError(f"step {plan.step}: it is {now}, the record says {was}")
        progress.step({"step": plan.step, "reward": result.reward_mean, "loss": result.loss, "n_sampled": plan.n_sampled})


def recorded_step(trained: dict[str, Any]) -> RecordedStep:
    """What is compared of a step, from its step_trained."""
    digests = {name: trained[name] for name in ("batch_digest", "loss_digest", "weights_digest")}
    return RecordedStep(**digests, figures={name: trained[name] for name in FIGURES})


def first_steps(spans: Sequence[Span], count: int | None) -> list[Span]:
    """The spans of the first steps; all when count is absent."""
    found, left = [], count
    for span in spans:
        steps = span.steps[:left]
        left = None if left is None else left - len(steps)
        if steps:
            found.append(replace(span, steps=steps))
    return found


def read_record(reader: LogReader) -> dict[str, Any]:
    """Settings, initial weights and the steps of a run that count, with what was recorded of each: an attempt that went on from a step
    voids that step and all later ones of the attempts before it."""
    kinds = "('attempt_started', 'batch_planned', 'step_trained', 'step_refused')"
    rows = reader.cut().table("events", ["lsn", "kind", "attempt", "body"], where=f"kind in {kinds}").sort_by("lsn").to_pylist()
    started: dict[int, dict[str, Any]] = {}
    plans: dict[int, StepPlan] = {}
    trained: dict[int, tuple[int, dict[str, Any] | None]] = {}
    for row in rows:
        body = json.loads(row["body"])
        match row["kind"]:
            case "attempt_started":
                started[row["attempt"]] = body
                trained = {step: known for step, known in trained.items() if step < (body["resumed_from_step"] or 0)}
            case "batch_planned":
                if plan_digest(body["plan"]) != body["plan_digest"]:
                    raise DataError(f"step {body['step']}: its plan does not have the recorded digest {body['plan_digest']}")
                plan = plan_from_json(body["plan"])
                plans[plan.step] = plan
            case "step_trained":
                trained[body["step"]] = row["attempt"], body
            case "step_refused":
                trained[body["step"]] = row["attempt"], None
    if not started:
        raise DataError("the log holds no attempt_started event; the run did not begin")
    spans = spans_of(started, {step: (plans[step], *trained[step]) for step in sorted(trained)})
    newest = started[max(started)]
    return {
        "config": Config.model_validate_json(newest["config"]),
        "model_digest": started[min(started)]["model_digest"],
        "plans": [step for span in spans for step in span.steps],
        "spans": spans,
        "num_steps": newest["num_steps"],
    }


def spans_of(started: dict[int, dict[str, Any]], steps: dict[int, tuple[StepPlan, int, dict[str, Any] | None]]) -> list[Span]:
    """Steps in order as spans of equal settings. started: attempts. steps: plan, attempt, and what was recorded."""
    spans: list[Span] = []
    settings: dict[str, Any] = {}
    for plan, attempt, trained in steps.values():
        body = started[attempt]
        own = trainer_settings(flat(json.loads(body["config"])), body["num_steps"])
        if not spans or own != settings:
            spans.append(Span(config=Config.model_validate_json(body["config"]), num_steps=body["num_steps"]))
            settings = own
        spans[-1].steps.append((plan, trained))
    return spans
