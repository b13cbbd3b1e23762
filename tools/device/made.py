"""Rollouts that no engine made: rows of random tokens, and plans over them, for programs that look at the trainer alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

PROMPT = 46
"""Tokens of a prompt: the mean of the questions that the device programs ask."""


def made_segment(generator: np.random.Generator, number: int, *, vocab_size: int, n_sampled: int, group_size: int) -> Any:
    """The number-th rollout of one segment. Its log-probs are about those of a model that knows nothing."""
    from molt.log.rows import Segment, Span, TokenSource

    group, member = divmod(number, group_size)
    logprobs = np.full(PROMPT + n_sampled, np.nan, np.float32)
    logprobs[PROMPT:] = generator.normal(-np.log(vocab_size), 0.1, n_sampled)
    sampled = Span(len=n_sampled, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0)
    return Segment(
        rollout_id=f"e0-p{group}/{member}/0", group_id=f"e0-p{group}", segment_index=0, num_segments=1, member=member,
        group_size=group_size, prompt_id=str(group), prompt_index=group, epoch=0,
        token_ids=generator.integers(0, vocab_size, len(logprobs)).astype(np.int32), behaviour_logprobs=logprobs,
        spans=[Span(len=PROMPT, source=TokenSource.USER), sampled], reward=float(number % 2), is_terminated=True, is_truncated=False,
        stop_reason="terminated", temperature=1.0, engine="made", tokenizer_digest="", template_digest="", started_at=0.0,
        finished_at=0.0,
    )  # fmt: skip


def made_plan(segments: Sequence[Any], step: int, *, num_ranks: int, micro_batch_tokens: int) -> Any:
    """A step over all of them."""
    from molt.admission.plan import SegmentRow, plan_step

    rows = [
        SegmentRow(
            segment_id=item.segment_id, rollout_id=item.rollout_id, group_id=item.group_id, prompt_index=item.prompt_index, lsn=0,
            n_tokens=item.n_tokens, n_sampled=item.n_sampled, version_min=0, version_max=0, reward=item.reward, outcome=None,
            is_truncated=False,
        )
        for item in segments
    ]  # fmt: skip
    return plan_step(rows, step=step, policy_version=0, seed=step, num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens, cursor=0)
