"""The facts that the leader writes down, as rows of the log: tries that were lost, steps that were made, what they consumed."""

from __future__ import annotations

import json
from dataclasses import asdict

from molt.admission.decide import GroupVerdict
from molt.admission.plan import StepPlan
from molt.admission.recover import OpenMember
from molt.learn.result import StepResult
from molt.log.rows import Consumption, Event, event


def group_decided(verdict: GroupVerdict, policy_version: int) -> Event:
    """The event of a group that was admitted, dropped or filtered."""
    body = {name: value for name, value in asdict(verdict).items() if name not in ("group_id", "decision")}
    return event("group_decided", group_id=verdict.group_id, policy_version=policy_version, decision=verdict.decision.value, **body)


def attempt_lost(member: OpenMember) -> Event:
    """The event of a try that was in flight when its attempt ended."""
    return event(
        "rollout_failed",
        rollout_id=f"{member.group_id}/{member.member}/{member.num_tries - 1}",
        group_id=member.group_id,
        member=member.member,
        reason="attempt_lost",
        error="the attempt ended while this rollout was in flight; it is generated again",
        n_sampled=0,
        num_tries=member.num_tries,
        is_final=False,
    )


def step_trained(result: StepResult, *, wait_s: float) -> Event:
    """The event of a step that was made."""
    return event(
        "step_trained",
        step=result.step,
        policy_version=result.policy_version,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        n_sampled=result.n_sampled,
        n_kept=result.n_kept,
        reward_mean=result.reward_mean,
        kl_mean=result.kl_mean,
        entropy_mean=result.entropy_mean,
        batch_digest=result.batch_digest,
        loss_digest=result.loss_digest,
        weights_digest=result.weights_digest,
        metrics=json.dumps(result.metrics, sort_keys=True),
        train_s=result.train_s,
        log_s=result.log_s,
        wait_s=wait_s,
    )


def consumption(plan: StepPlan, result: StepResult) -> list[Consumption]:
    """One row for each segment of a step that was made."""
    return [
        Consumption(
            step=plan.step,
            segment_id=use.segment_id,
            rollout_id=plan.segments[use.place].rollout_id,
            group_id=plan.segments[use.place].group_id,
            policy_version=plan.policy_version,
            rank=use.rank,
            micro_batch=use.micro_batch,
            position=use.position,
            n_sampled=use.n_sampled,
            n_kept=use.n_kept,
            lag=None if (oldest := plan.segments[use.place].version_min) is None else plan.policy_version - oldest,
            cursor=plan.cursor,
        )
        for use in result.uses
    ]
