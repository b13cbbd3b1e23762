"""Routed experts of a segment, put together from its calls, by absolute position."""

from __future__ import annotations

import numpy as np

from molt.agents.segments import SegmentDraft
from molt.errors import LineageError
from molt.log.rows import Payload


def segment_routing(draft: SegmentDraft) -> np.ndarray | None:
    """(n_tokens - 1, L, K) int16, -1 where unknown; None for a dense model.

    Each call tells the rows that no earlier one did. Where two do, the first stays: its experts made the tokens after it.
    The last token of a call is computed by the next call; the last one of the segment never is.
    """
    if not draft.routing:
        return None
    length = len(draft.token_ids) - 1
    _, _, example = draft.routing[0]
    if example.ndim != 3:
        raise LineageError(f"the engine gave routed experts of shape {example.shape}; it must be (positions, layers, experts)")
    whole = np.full((length, *example.shape[1:]), -1, np.int16)
    for num_prompt, first, rows in draft.routing:
        if rows.shape[1:] != example.shape[1:] or not num_prompt <= first + len(rows) <= length:
            raise LineageError(
                f"the engine gave routed experts of shape {rows.shape} from position {first} for a prompt of {num_prompt} of "
                f"{length + 1} tokens"
            )
        known = whole[first : first + len(rows)]
        is_unknown = (known < 0).all(axis=(1, 2))
        known[is_unknown] = rows[is_unknown]
    return whole


def routing_payload(draft: SegmentDraft) -> Payload | None:
    """The payload that the segment names, a byte an expert where all fit into one; None for a dense model."""
    routing = segment_routing(draft)
    if routing is None:
        return None
    is_narrow = int(routing.max(initial=-1)) <= np.iinfo(np.int8).max
    return Payload.of_array("routing", routing.astype(np.int8) if is_narrow else routing)
