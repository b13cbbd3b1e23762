"""Routed experts of a segment, put together from its calls, by absolute position."""

from __future__ import annotations

import numpy as np

from molt.agents.segments import SegmentDraft
from molt.errors import LineageError
from molt.log.rows import Payload


def segment_routing(draft: SegmentDraft) -> np.ndarray | None:
    """(n_tokens - 1, L, K) int16, -1 where unknown; None for a dense model.

    A position keeps what the call that first computed it said: a later call that reads it from a cache has other rows there.
    The last token of a call is computed by the next call; the last one of the segment never is.
    """
    if not draft.routing:
        return None
    length = len(draft.token_ids) - 1
    _, first = draft.routing[0]
    if first.ndim != 3:
        raise LineageError(f"the engine gave routed experts of shape {first.shape}; it must be (positions, layers, experts)")
    whole = np.full((length, *first.shape[1:]), -1, np.int16)
    for num_prompt, rows in draft.routing:
        if rows.shape[1:] != first.shape[1:] or not num_prompt <= len(rows) <= length:
            raise LineageError(f"the engine gave routed experts of shape {rows.shape} for a prompt of {num_prompt} of {length + 1} tokens")
        known = whole[: len(rows)]
        is_unknown = (known < 0).all(axis=(1, 2))
        known[is_unknown] = rows[is_unknown]
    return whole


def routing_payload(draft: SegmentDraft) -> Payload | None:
    """The payload that the segment names; None for a dense model."""
    routing = segment_routing(draft)
    return None if routing is None else Payload.of_array("routing", routing)
