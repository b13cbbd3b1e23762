"""A run's log made without a model: rollouts, plans, scores and gates as the trainer would have written them, of any size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from molt.admission.plan import SegmentRow, StepPlan, plan_digest, plan_step, plan_to_json
from molt.algo.advantage import compute_advantages
from molt.algo.batch import RaggedBatch
from molt.algo.correction import importance_gate
from molt.algo.kl import kl_estimate
from molt.algo.reward import shape_rewards
from molt.config import Config
from molt.log.producer import Producer
from molt.log.rows import Consumption, Score, Segment, Span, TokenSource, event
from molt.log.writer import LogWriter

STEP_S = 10.0
"""Seconds from one step to the next."""
PROMPT = 8
"""Tokens of every prompt."""


def make_run(
    where: Path,
    config: Config,
    *,
    num_steps: int,
    groups_per_step: int = 4,
    group_size: int = 4,
    mean_length: int = 50,
    max_lag: int = 1,
    drift: float = 0.05,
    has_extras: bool = True,
    seed: int = 0,
) -> Path:
    """Write the log of a made run. Lengths are geometric-like and longer rollouts score worse; a stale token drifts more.

    has_extras: critic values, reference and teacher log-probs are in the scores.
    """
    where.mkdir(parents=True, exist_ok=True)
    writer = LogWriter.open(where, run=where.name, attempt=1, store="process")
    try:
        producer = Producer(writer, "made", is_validating=False)
        producer.append_sync(events=[_started(config, num_steps)])
        generator = np.random.default_rng(seed)
        for step in range(num_steps):
            is_mixed = config.algo.advantage.is_correction_level != "off"
            made = list(_rollouts(generator, step, groups_per_step, group_size, mean_length, max_lag, is_mixed))
            ack = producer.append_sync(segments=made, events=[_dispatched(segment, group_size) for segment in made if segment.member == 0])
            plan = _plan(made, step, ack.lsn_end, config)
            text = plan_to_json(plan)
            scores, gate, events = _scores(generator, plan, made, config, drift, has_extras)
            planned = event(
                "batch_planned", step=step, policy_version=step, plan=text, plan_digest=plan_digest(text), happened_at=STEP_S * (step + 1),
                groups=sorted({row.group_id for row in plan.segments}), num_segments=len(plan.segments), num_rollouts=plan.num_rollouts,
                n_sampled=plan.n_sampled, seed=0, cursor=plan.cursor,
            )  # fmt: skip
            producer.append_sync(events=[planned])
            producer.append_sync(scores=scores, events=events)
            producer.append_sync(events=[_trained(plan, int(gate.n_kept_S.sum()), step)], consumption=_consumed(plan, gate))
    finally:
        writer.close()
    return where


def _rollouts(
    generator: np.random.Generator, step: int, groups_per_step: int, group_size: int, mean_length: int, max_lag: int, is_mixed: bool
) -> Iterator[Segment]:
    for place in range(groups_per_step):
        prompt = step * groups_per_step + place
        version = max(0, step - int(generator.integers(0, max_lag + 1)))
        started = STEP_S * version + generator.uniform(0, 1)
        for member in range(group_size):
            length = max(1, int(generator.gamma(2.0, mean_length / 2)))
            split = int(generator.integers(0, length + 1)) if version < step and is_mixed else length
            reward = float(generator.uniform() < 1 / (1 + length / mean_length))
            logprobs = -generator.gamma(0.7, 0.7, length).astype(np.float32)
            spans = [Span(len=PROMPT, source=TokenSource.USER)]
            spans += [_sampled(n, v) for n, v in ((split, version), (length - split, version + 1)) if n]
            yield Segment(
                rollout_id=f"e0-p{prompt}/{member}/1", group_id=f"e0-p{prompt}", segment_index=0, num_segments=1, member=member,
                group_size=group_size, prompt_id=f"{prompt:x}", prompt_index=prompt, epoch=0,
                token_ids=generator.integers(0, 1000, PROMPT + length).astype(np.int32),
                behaviour_logprobs=np.concatenate([np.full(PROMPT, np.nan, np.float32), logprobs]), spans=spans, reward=reward,
                outcome=reward, is_terminated=True, is_truncated=False, stop_reason="terminated", temperature=1.0, engine="made",
                tokenizer_digest="0", template_digest="0", started_at=started,
                finished_at=min(started + 0.05 * length, STEP_S * (step + 1) - 0.1),
            )  # fmt: skip


def _sampled(length: int, version: int) -> Span:
    return Span(len=length, source=TokenSource.POLICY, trainable=True, policy_version=version, kv_version=version)


def _plan(made: list[Segment], step: int, lsn: int, config: Config) -> StepPlan:
    rows = [
        SegmentRow(
            segment_id=s.segment_id, rollout_id=s.rollout_id, group_id=s.group_id, prompt_index=s.prompt_index, lsn=lsn,
            n_tokens=s.n_tokens, n_sampled=s.n_sampled, version_min=s.version_min, version_max=s.version_max, reward=s.reward,
            outcome=s.outcome, is_truncated=s.is_truncated,
        )
        for s in made
    ]  # fmt: skip
    budget = config.train.micro_batch_tokens
    return plan_step(rows, step=step, policy_version=step, seed=0, num_ranks=1, micro_batch_tokens=budget, cursor=lsn)


def _scores(
    generator: np.random.Generator, plan: StepPlan, made: list[Segment], config: Config, drift: float, has_extras: bool
) -> tuple[list[Score], Any, list[Any]]:
    by_id = {s.segment_id: s for s in made}
    ordered = [by_id[row.segment_id] for row in plan.segments]
    behaviour_T = torch.from_numpy(np.concatenate([s.behaviour_logprobs[PROMPT:] for s in ordered]))
    spans = [span for segment in ordered for span in segment.spans[1:]]
    version_T = torch.tensor(np.repeat([span.policy_version for span in spans], [span.len for span in spans]))
    n = len(behaviour_T)
    spread = drift * (0.2 + (plan.step - version_T.numpy()))
    trainer_T = torch.from_numpy((behaviour_T.numpy() + spread * generator.normal(size=n)).astype(np.float32)).clamp(max=0.0)
    names = ("values", "reference", "teacher")
    extras = {name: torch.from_numpy(generator.normal(size=n).astype(np.float32) * 0.1) if has_extras else None for name in names}
    for name in names[1:]:
        column = extras[name]
        extras[name] = None if column is None else (trainer_T + column).clamp(max=0.0)
    batch = RaggedBatch.from_rows(plan.segments)
    reference_T = extras["reference"]
    advantages_T = compute_advantages(
        config.algo.advantage.estimator,
        shape_rewards(batch, config.algo, max_len=config.data.max_len).batch,
        config.algo,
        kl_T=None if reference_T is None else kl_estimate(config.algo.kl.estimator, trainer_T, reference_T),
        values_T=extras["values"],
        logprobs_T=trainer_T,
        teacher_logprobs_T=extras["teacher"],
    ).advantages_T
    gate = importance_gate(
        trainer_T,
        behaviour_T,
        batch.segment_T,
        config.algo,
        num_segments=batch.num_segments,
        version_T=version_T,
        trainer_version=plan.step,
    )
    bounds = np.concatenate([[0], np.cumsum(batch.lengths_S.numpy())])
    scores, events = [], []
    for place, row in enumerate(plan.segments):
        span = slice(int(bounds[place]), int(bounds[place + 1]))

        def part(column: torch.Tensor | None, span: slice = span) -> Any:
            return None if column is None else column[span].numpy()

        scores.append(
            Score(
                step=plan.step, policy_version=plan.step, segment_id=row.segment_id, rank=0, trainer_logprobs=part(trainer_T),
                reference_logprobs=part(extras["reference"]), teacher_logprobs=part(extras["teacher"]), values=part(extras["values"]),
                advantages=part(advantages_T), gate_weights=part(gate.weights_T),
            )
        )  # fmt: skip
        low, high = gate.band
        events.append(
            event(
                "gate_decided", step=plan.step, segment_id=row.segment_id, level=config.algo.advantage.is_correction_level,
                mode=config.algo.advantage.is_correction_mode, low=low, high=high, n_tokens=int(gate.n_tokens_S[place]),
                n_kept=int(gate.n_kept_S[place]), ratio_mean=float(gate.ratio_mean_S[place]),
                log_ratio_min=float(gate.log_ratio_min_S[place]), log_ratio_max=float(gate.log_ratio_max_S[place]),
            )
        )  # fmt: skip
    return scores, gate, events


def _started(config: Config, num_steps: int) -> Any:
    return event(
        "attempt_started", config=config.model_dump_json(), config_digest="0", code_digest="0", packages=json.dumps({}),
        hardware=json.dumps({}), seed=0, model_digest="0", num_steps=num_steps, pid=0, host="made",
    )  # fmt: skip


def _dispatched(segment: Segment, group_size: int) -> Any:
    return event(
        "group_dispatched", group_id=segment.group_id, epoch=0, order_index=segment.prompt_index, prompt_index=segment.prompt_index,
        prompt_id=segment.prompt_id, group_size=group_size, members=list(range(group_size)), purpose="train",
        policy_version=segment.version_min, happened_at=segment.started_at,
    )  # fmt: skip


def _trained(plan: StepPlan, n_kept: int, step: int) -> Any:
    return event(
        "step_trained", step=step, policy_version=step, loss=0.0, grad_norm=0.0, learning_rate=0.0, n_sampled=plan.n_sampled, n_kept=n_kept,
        batch_digest="0", loss_digest="0", metrics="{}", train_s=1.0, log_s=0.0, wait_s=0.0, happened_at=STEP_S * (step + 1) + 1.0,
    )  # fmt: skip


def _consumed(plan: StepPlan, gate: Any) -> list[Consumption]:
    return [
        Consumption(
            step=plan.step, segment_id=row.segment_id, rollout_id=row.rollout_id, group_id=row.group_id, policy_version=plan.step, rank=0,
            micro_batch=0, position=place, n_sampled=row.n_sampled, n_kept=int(gate.n_kept_S[place]),
            lag=plan.step - (row.version_min or 0), cursor=plan.cursor,
        )
        for place, row in enumerate(plan.segments)
    ]  # fmt: skip
