"""Rows for fault campaigns: each carries its stream and its number, so that any loss, double or swap shows."""

from __future__ import annotations

import numpy as np

from molt.log.rows import Event, Payload, Segment, Span, TokenSource, event


def segment(stream: int, number: int, n_tokens: int = 64) -> Segment:
    """The number-th segment of a stream."""
    logprobs = np.full(n_tokens, np.nan, np.float32)
    logprobs[n_tokens // 2 :] = -0.5
    return Segment(
        rollout_id=f"e{stream}-p{number}/0/0",
        group_id=f"e{stream}-p{number}",
        segment_index=0,
        num_segments=1,
        member=0,
        group_size=1,
        prompt_id=f"{stream}-{number}",
        prompt_index=number,
        epoch=stream,
        token_ids=(np.arange(n_tokens, dtype=np.int32) * 7 + number) % 50_000,
        behaviour_logprobs=logprobs,
        spans=[
            Span(len=n_tokens // 2, source=TokenSource.USER),
            Span(len=n_tokens - n_tokens // 2, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0),
        ],
        reward=1.0,
        is_terminated=True,
        is_truncated=False,
        stop_reason="terminated",
        temperature=1.0,
        engine="none",
        tokenizer_digest="none",
        template_digest="none",
        started_at=0.0,
        finished_at=1.0,
    )


def fact(stream: int, number: int) -> Event:
    """The event that travels with a segment."""
    return event("step_refused", step=number, reason="nothing_kept", error=str(stream), n_sampled=number, happened_at=0.0)


def blob(stream: int, number: int) -> Payload:
    """The payload that travels with a segment; two neighbours share one."""
    return Payload.of_array("routing", np.full(256, stream * 100_000 + number // 2, np.int32))
