"""Segments: what a rollout sampled, cut where its history was rewritten, each token with its lineage.

A call's prompt is compared, as ids, with the segment so far. The outcome is one of three:

    continues ... the segment is a prefix of the prompt: the rest of the prompt is glue and observation
    opens ....... they differ at some position: a new segment begins with the whole prompt
    refused ..... the engine's answer has no full lineage: LineageError, and nothing of the rollout is trained
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from molt.agents.conversation import CallPrompt
from molt.data.processor import PlacedImage
from molt.errors import LineageError
from molt.log.rows import Span, TokenSource
from molt.rollout.engine import FinishReason, Generation

MAX_LOGPROB = 1e-3
"""Nats: above this a log-prob is no probability; up to it, rounding of the engine's float32 softmax."""


@dataclass(slots=True, kw_only=True)
class SegmentDraft:
    """One segment while it grows."""

    opened_by: str
    first_difference: int | None
    """Position at which the prompt left the segment before; None for the first."""
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """(n,) int32."""
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(n,) float32, NaN where not sampled."""
    spans: list[Span] = field(default_factory=list)
    routing: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """(length of the prompt, position of the first row, routed experts) of each call."""
    images: tuple[PlacedImage, ...] = ()
    """Images by their place in token_ids."""

    @property
    def num_routed(self) -> int:
        """Positions from the first on whose routes are known; the next call need not tell them again."""
        known = 0
        for _, first, rows in self.routing:
            if first <= known:
                is_unknown = (rows < 0).all(axis=tuple(range(1, rows.ndim)))
                known = max(known, first + (int(is_unknown.argmax()) if is_unknown.any() else len(rows)))
        return known


class SegmentBuilder:
    """Takes the calls of one rollout in order."""

    def __init__(self, *, is_trainable: bool = True, stop_token_ids: Sequence[int] = ()) -> None:
        self.segments: list[SegmentDraft] = []
        self.num_sampled = 0
        """Tokens sampled in all calls."""
        self.num_empty = 0
        """Calls that sampled nothing; they leave no token."""
        self._is_trainable = is_trainable
        self._stop_ids = np.array(stop_token_ids, np.int32)

    def add(self, prompt: CallPrompt, generation: Generation, turn: int) -> None:
        """Take one call. Its prompt and its generation are what the engine consumed and produced."""
        _check(prompt, generation, self._stop_ids)
        if len(generation.token_ids) == 0:
            self.num_empty += 1
            return
        draft = self._draft(prompt)
        known = len(draft.token_ids)
        spans = _source_spans(prompt.sources, known, turn) + _sampled_spans(generation, turn, is_trainable=self._is_trainable)
        sampled = np.asarray(generation.token_ids, np.int32)
        draft.token_ids = np.concatenate([prompt.token_ids.astype(np.int32), sampled])
        missing = np.full(len(prompt.token_ids) - known, np.nan, np.float32)
        draft.logprobs = np.concatenate([draft.logprobs, missing, np.asarray(generation.logprobs, np.float32)])
        draft.spans += spans
        draft.images = prompt.images
        if generation.routed_experts is not None:
            draft.routing.append((len(prompt.token_ids), generation.routes_from, generation.routed_experts))
        self.num_sampled += len(sampled)

    def num_routed(self, prompt: CallPrompt) -> int:
        """Positions of a call's prompt whose routes earlier calls of its segment have told."""
        if not self.segments:
            return 0
        last = self.segments[-1]
        is_continued = first_difference(last.token_ids, prompt.token_ids) == len(last.token_ids)
        return min(last.num_routed, len(prompt.token_ids)) if is_continued else 0

    def _draft(self, prompt: CallPrompt) -> SegmentDraft:
        """The segment that the prompt continues, or a new one."""
        if not self.segments:
            self.segments.append(SegmentDraft(opened_by="start", first_difference=None))
            return self.segments[-1]
        last = self.segments[-1]
        place = first_difference(last.token_ids, prompt.token_ids)
        if place < len(last.token_ids):
            opened_by = prompt.opened_by if prompt.opened_by != "start" else "template"
            self.segments.append(SegmentDraft(opened_by=opened_by, first_difference=place))
        return self.segments[-1]


def first_difference(first: np.ndarray, second: np.ndarray) -> int:
    """First position at which two id arrays differ; the shorter length when one is a prefix of the other."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _check(prompt: CallPrompt, generation: Generation, stop_ids: np.ndarray) -> None:
    """Refuse a call whose tokens have no full lineage."""
    if len(prompt.token_ids) == 0:
        raise LineageError("the prompt of a call has no ids; an engine cannot have sampled from it")
    count = len(generation.token_ids)
    for name in ("logprobs", "policy_versions", "kv_versions"):
        length = len(getattr(generation, name))
        if length != count:
            raise LineageError(f"the engine gave {count} ids and {length} {name}; all per-token columns must be as long")
    consumed = generation.prompt_ids
    if prompt.images and consumed is None:
        raise LineageError("the prompt of a call holds images, and the engine did not say which ids it made of them")
    if consumed is not None and not np.array_equal(consumed, prompt.token_ids):
        place = first_difference(np.asarray(consumed), prompt.token_ids)
        raise LineageError(
            f"the engine consumed {len(consumed)} prompt ids where {len(prompt.token_ids)} were meant, first different at {place}; "
            "engine and agent expand images differently"
        )
    bad = np.flatnonzero(~np.isfinite(generation.logprobs) | (generation.logprobs > MAX_LOGPROB))
    if len(bad):
        value = float(generation.logprobs[bad[0]])
        raise LineageError(f"the log-prob of sampled token {bad[0]} of {count} is {value}; it must be finite and at most 0")
    if (np.asarray(generation.token_ids) < 0).any():
        raise LineageError("the engine gave a negative id")
    is_stop = np.isin(generation.token_ids, stop_ids)
    if is_stop[:-1].any():
        raise LineageError(f"the engine sampled past the stop id at token {int(np.argmax(is_stop))} of {count}")
    if len(stop_ids) and generation.finish_reason is FinishReason.STOP and not is_stop[-1:].any():
        raise LineageError("the engine says stop, and the last id is no stop id; the id that ended a call must be kept")
    if (generation.policy_versions < 0).any() or (generation.kv_versions < 0).any():
        raise LineageError("the engine gave a negative policy or cache version; every sampled token needs both")


def _source_spans(sources: tuple[tuple[TokenSource, int], ...], known: int, turn: int) -> list[Span]:
    """Spans of the prompt's tokens from position known on."""
    spans: list[Span] = []
    position = 0
    for source, length in sources:
        new = min(length, position + length - known)
        if new > 0:
            if spans and spans[-1].source == source:
                new += spans.pop().len
            spans.append(Span(len=new, source=source, turn=turn))
        position += length
    return spans


def _sampled_spans(generation: Generation, turn: int, *, is_trainable: bool) -> list[Span]:
    """Spans of sampled tokens: a new one where the policy or cache version changes."""
    policy, cache = np.asarray(generation.policy_versions), np.asarray(generation.kv_versions)
    changes = np.flatnonzero((np.diff(policy) != 0) | (np.diff(cache) != 0)) + 1
    edges = [0, *changes.tolist(), len(policy)]
    return [
        Span(
            len=end - start,
            source=TokenSource.POLICY,
            trainable=is_trainable,
            policy_version=int(policy[start]),
            kv_version=int(cache[start]),
            turn=turn,
        )
        for start, end in pairwise(edges)
    ]
