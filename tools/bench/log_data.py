"""Rows for the benchmark of the log: agentic segments of about a thousand tokens, half of them sampled, ids spread like words."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from molt.log.rows import Segment, Span, TokenSource, to_arrow

NUM_TURNS = 4


def segments(count: int, *, n_tokens: int = 1000, start: int = 0, seed: int = 0) -> list[Segment]:
    """Segments of four turns: an observation, then sampled tokens with a log-prob each."""
    chance = np.random.default_rng(seed + start)
    part = n_tokens // (2 * NUM_TURNS)
    made = []
    for number in range(start, start + count):
        ids = np.minimum(chance.zipf(1.2, n_tokens), 151_000).astype(np.int32)
        logprobs = np.full(n_tokens, np.nan, np.float32)
        spans: list[Span] = []
        for turn in range(NUM_TURNS):
            first = 2 * part * turn + part
            logprobs[first : first + part] = -chance.exponential(0.5, part).astype(np.float32)
            version = number // 1000 + (turn > 2)
            spans += [
                Span(len=part, source=TokenSource.OBSERVATION if turn else TokenSource.USER, turn=turn),
                Span(len=part, source=TokenSource.POLICY, trainable=True, policy_version=version, kv_version=version, turn=turn),
            ]
        made.append(_segment(number, ids[: 2 * part * NUM_TURNS], logprobs[: 2 * part * NUM_TURNS], spans, float(chance.integers(0, 2))))
    return made


def _segment(number: int, ids: np.ndarray, logprobs: np.ndarray, spans: list[Span], reward: float) -> Segment:
    return Segment(
        rollout_id=f"e0-p{number // 8}/{number % 8}/0",
        group_id=f"e0-p{number // 8}",
        segment_index=0,
        num_segments=1,
        member=number % 8,
        group_size=8,
        prompt_id=f"{number // 8:032x}",
        prompt_index=number // 8,
        epoch=0,
        token_ids=ids,
        behaviour_logprobs=logprobs,
        spans=spans,
        reward=reward,
        outcome=reward,
        is_terminated=True,
        is_truncated=False,
        stop_reason="terminated",
        temperature=1.0,
        engine="engine-0",
        tokenizer_digest="0" * 32,
        template_digest="1" * 32,
        started_at=1.7e9 + number,
        finished_at=1.7e9 + number + 5,
    )


def batches(count: int, rows: int, *, n_tokens: int = 1000) -> list[pa.RecordBatch]:
    """Encoded messages of that many rows each."""
    return [
        to_arrow("segments", segments(rows, n_tokens=n_tokens, start=index * rows), run="run", attempt=1, producer="p", seq=index)
        for index in range(count)
    ]


def with_lsn(rows: pa.RecordBatch, start: int) -> pa.Table:
    """The rows as a plain writer would store them."""
    return pa.Table.from_batches(
        [rows.add_column(0, pa.field("lsn", pa.int64(), False), pa.array(range(start, start + rows.num_rows), pa.int64()))]
    )
