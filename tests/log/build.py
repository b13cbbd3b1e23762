"""Rows for the tests of the log, with every number chosen so that sums can be done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from molt.log.message import Message
from molt.log.rows import Event, Medium, Segment, Span, TokenSource, event, to_arrow


def make_segment(
    index: int = 0, *, prompt: int = 2, sampled: int = 3, version: int = 0, rollout: str | None = None, **more: Any
) -> Segment:
    """A segment of `prompt` user tokens 0, 1 ... and `sampled` policy tokens that go on counting, with log-probs -1, -2 ..."""
    n_tokens = prompt + sampled
    logprobs = np.full(n_tokens, np.nan, np.float32)
    logprobs[prompt:] = -np.arange(1, sampled + 1, dtype=np.float32)
    fields: dict[str, Any] = {
        "rollout_id": rollout or f"e0-p{index}/0/0",
        "group_id": f"e0-p{index}",
        "segment_index": 0,
        "num_segments": 1,
        "member": 0,
        "group_size": 1,
        "prompt_id": f"prompt-{index}",
        "prompt_index": index,
        "epoch": 0,
        "token_ids": np.arange(n_tokens, dtype=np.int32) + 100 * index,
        "behaviour_logprobs": logprobs,
        "spans": [
            Span(len=prompt, source=TokenSource.USER),
            Span(len=sampled, source=TokenSource.POLICY, trainable=True, policy_version=version, kv_version=version, turn=0),
        ],
        "reward": 1.0,
        "is_terminated": True,
        "is_truncated": False,
        "stop_reason": "terminated",
        "temperature": 1.0,
        "engine": "scripted",
        "tokenizer_digest": "t",
        "template_digest": "c",
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    return Segment(**(fields | more))


def make_image_segment(index: int, *digests: str, **more: Any) -> Segment:
    """A segment whose image stands at tokens 1 to 4: marker, two features, marker; its payloads are image, then pixel_values."""
    named = zip(("image", "pixel_values"), digests, strict=False)
    fields: dict[str, Any] = {
        "media": [Medium(name=name, payload_digest=digest, position=1, len=4) for name, digest in named],
        "spans": [
            Span(len=1, source=TokenSource.USER),
            Span(len=1, source=TokenSource.TEMPLATE),
            Span(len=2, source=TokenSource.IMAGE),
            Span(len=1, source=TokenSource.TEMPLATE),
            Span(len=3, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0, turn=0),
        ],
    }
    return make_segment(index, prompt=5, sampled=3, **(fields | more))


def segment_id(index: int) -> str:
    """Name of the segment that make_segment(index) makes."""
    return f"e0-p{index}/0/0/0"


def make_fact(number: int) -> Event:
    """An event that carries a number."""
    return event("step_refused", step=number, reason="nothing_kept", error="", n_sampled=number, happened_at=float(number))


def make_message(producer: str, seq: int, indices: Sequence[int], *, attempt: int = 1, facts: Sequence[int] = ()) -> Message:
    """A message with one segment per index and one event per fact."""
    tables = {}
    if indices:
        tables["segments"] = to_arrow(
            "segments", [make_segment(index) for index in indices], run="run", attempt=attempt, producer=producer, seq=seq
        )
    if facts:
        tables["events"] = to_arrow(
            "events", [make_fact(number) for number in facts], run="run", attempt=attempt, producer=producer, seq=seq
        )
    return Message.of(producer, seq, attempt, tables)
