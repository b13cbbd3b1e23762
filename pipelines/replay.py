"""Replay a run: the recorded plans and rows through the same trainer code, compared bit by bit, up to the first difference."""

from __future__ import annotations

import json
from typing import Any

from molt.admission.plan import StepPlan, plan_digest, plan_from_json
from molt.config import Config
from molt.driver.house import ray_session
from molt.errors import DataError, ReplayMismatchError
from molt.learn.ranks import RankGroup
from molt.learn.result import RecordedStep
from molt.log.reader import LogReader
from molt.runs import RunDir
from molt.view.panel import Progress


async def main(run: RunDir, *, steps: int | None = None) -> dict[str, Any]:
    """Train the recorded steps again from the initial weights. Returns what was compared; raises ReplayMismatchError at a difference,
    naming step, segment and token."""
    reader = LogReader.open(run.path)
    record = read_record(reader)
    plans = record["plans"][:steps]
    if not plans:
        raise DataError(f"run {run.name} has no planned step; there is nothing to replay")
    config: Config = record["config"]
    num_compared = 0
    with ray_session(config), Progress(config, run=run, num_steps=len(plans)) as progress:
        progress.waiting("starting trainer ranks")
        ranks = await RankGroup.start(config, run_dir=run.path, run=run.name, mode="replay", num_steps=record["num_steps"])
        try:
            begun_with = await ranks.weights_digest()
            if begun_with != record["model_digest"]:
                raise ReplayMismatchError(
                    f"actor.model_name_or_path={config.actor.model_name_or_path} has weights {begun_with}, "
                    f"the run began with {record['model_digest']}; give the model that it began with"
                )
            for plan, trained in plans:
                progress.waiting(f"replaying step {plan.step}")
                recorded = None if trained is None else RecordedStep(**{name: trained[name] for name in RecordedStep.__dataclass_fields__})
                result = await ranks.train(plan, recorded)
                if (result.refused is None) != (trained is not None):
                    was = "trained" if trained is not None else "refused or not finished"
                    now = "trained" if result.refused is None else f"refused ({result.refused.reason}: {result.refused.error})"
                    raise ReplayMismatchError(f"step {plan.step}: it is {now}, the record says {was}")
                num_compared += trained is not None
                progress.step({"step": plan.step, "reward": result.reward_mean, "loss": result.loss, "n_sampled": plan.n_sampled})
            ended_with = await ranks.weights_digest()
        finally:
            await ranks.stop()
    return {
        "run": run.name,
        "num_steps": len(plans),
        "num_compared": num_compared,
        "is_equal": True,
        "compared": "batch digest, loss digest, log-probs, advantages, gate weights, weights digest, bit by bit",
        "weights_digest": ended_with,
    }


def read_record(reader: LogReader) -> dict[str, Any]:
    """Settings, initial weights and the plans of a run with what was recorded of each step, newest attempt first in force."""
    kinds = "('attempt_started', 'batch_planned', 'step_trained', 'step_refused')"
    rows = reader.cut().table("events", ["lsn", "kind", "attempt", "body"], where=f"kind in {kinds}").sort_by("lsn").to_pylist()
    started: list[dict[str, Any]] = []
    plans: dict[int, StepPlan] = {}
    trained: dict[int, dict[str, Any] | None] = {}
    for row in rows:
        body = json.loads(row["body"])
        match row["kind"]:
            case "attempt_started":
                started.append(body)
            case "batch_planned":
                if plan_digest(body["plan"]) != body["plan_digest"]:
                    raise DataError(f"step {body['step']}: its plan does not have the recorded digest {body['plan_digest']}")
                plan = plan_from_json(body["plan"])
                plans[plan.step] = plan
            case "step_trained":
                trained[body["step"]] = body
            case "step_refused":
                trained[body["step"]] = None
    if not started:
        raise DataError("the log holds no attempt_started event; the run did not begin")
    config = Config.model_validate_json(started[-1]["config"])
    return {
        "config": config,
        "model_digest": started[0]["model_digest"],
        "plans": [(plans[step], trained[step]) for step in sorted(plans) if step in trained],
        "num_steps": started[-1]["num_steps"],
    }
