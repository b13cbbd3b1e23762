"""Conversations of a data set as supervised rows of the log, and the plans that train them.

A conversation is one segment of purpose sft: its assistant turns are spans of source demonstration, which alone are trainable.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from molt.admission.order import PromptOrder
from molt.admission.plan import SegmentRow, StepPlan, plan_step
from molt.agents.env import Tool
from molt.agents.probe import check_tokenizer
from molt.agents.render import ChatRenderer
from molt.agents.supervised import SupervisedRow, supervised_row, tools_of
from molt.agents.tokenizer import Tokenizer
from molt.config import Config
from molt.data.messages import Message, normal_messages, told_as_text
from molt.data.rows import read_rows
from molt.errors import AgentError, DataError
from molt.log.rows import Segment, Span, TokenSource

Conversation = Sequence[Message]
TOOLS_KEY = "tools"
"""Key of a row's tools: definitions as chat templates take them."""
HELD_ALIKE = ("prompt_id", "tokenizer_digest", "template_digest", "n_tokens", "n_trainable")
"""What tells one conversation as it is trained from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One row of a data set."""

    messages: Conversation
    tools: tuple[Tool, ...] = ()
    """What its template shows beside them."""

    @property
    def digest(self) -> str:
        """blake2b-128 hex of messages and tools."""
        shown = [list(self.messages), [tool.definition() for tool in self.tools]] if self.tools else list(self.messages)
        return _digest(json.dumps(shown, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """A data set of conversations, tokenized by the model's own template."""

    segments: tuple[Segment, ...]
    digest: str
    """blake2b-128 hex over all messages."""

    @classmethod
    def load(cls, file: str, config: Config, *, setting: str = "sft.dataset", prefix: str = "sft") -> Demonstrations:
        """Read and tokenize. DataError names a row without an assistant turn, or one longer than data.max_len."""
        model = config.actor.model_name_or_path
        assert model is not None, "settings have been checked"
        tokenizer = Tokenizer.load(model)
        check_tokenizer(tokenizer)
        renderer_of = lru_cache(maxsize=64)(lambda named: ChatRenderer(tokenizer, tools=tools_of(named)))
        segments = []
        for number, shown in enumerate(read_demonstrations(file, setting=setting, messages_key=config.data.messages_key)):
            renderer = renderer_of(json.dumps([tool.definition() for tool in shown.tools]))
            try:
                row = supervised_row(renderer, shown.messages, last_turn_only=config.sft.last_turn_only)
            except (AgentError, DataError) as error:
                raise DataError(f"{setting}={file}, row {number + 1}: {error}") from error
            if len(row.token_ids) > config.data.max_len:
                raise DataError(
                    f"{setting}={file}, row {number + 1}: {len(row.token_ids)} tokens, data.max_len={config.data.max_len}; "
                    "raise it or shorten the conversation"
                )
            segments.append(demonstration(row, shown.digest, number, renderer, prefix=prefix))
        return cls(segments=tuple(segments), digest=_digest("".join(s.prompt_id for s in segments)))

    def __len__(self) -> int:
        return len(self.segments)


def demonstration(row: SupervisedRow, prompt_id: str, number: int, renderer: ChatRenderer, *, prefix: str) -> Segment:
    """One conversation as a finished rollout that nobody sampled."""
    now = time.time()
    group_id = f"{prefix}-p{number}"
    return Segment(
        rollout_id=f"{group_id}/0/0",
        group_id=group_id,
        segment_index=0,
        num_segments=1,
        member=0,
        group_size=1,
        prompt_id=prompt_id,
        prompt_index=number,
        epoch=0,
        purpose="sft",
        token_ids=row.token_ids,
        behaviour_logprobs=np.full(len(row.token_ids), np.nan, np.float32),
        spans=_spans(row.is_target_T),
        reward=None,
        is_terminated=True,
        is_truncated=False,
        stop_reason="terminated",
        temperature=1.0,
        logprobs_mode="none",
        engine="none",
        tokenizer_digest=renderer.tokenizer_digest,
        template_digest=renderer.template_digest,
        started_at=now,
        finished_at=now,
    )


def not_yet_held(segments: Sequence[Segment], held: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Those that the log does not hold yet. held: segment_id and HELD_ALIKE of its rows. DataError where it holds another conversation."""
    known = {row["segment_id"]: row for row in held}
    fresh = [segment for segment in segments if segment.segment_id not in known]
    for segment in segments:
        row = known.get(segment.segment_id, {})
        if differing := [name for name in row.keys() & set(HELD_ALIKE) if row[name] != getattr(segment, name)]:
            raise DataError(
                f"conversation {segment.prompt_index + 1} of {segment.group_id.rpartition('-p')[0]} is not the one that the log holds: "
                f"another {min(differing)}; go on with the conversations, model and sft.last_turn_only that the run began with, "
                "or begin a new run"
            )
    return fresh


def plan_of(
    segments: Sequence[Segment], *, step: int, seed: int, cursor: int, num_ranks: int, micro_batch_tokens: int, policy_version: int
) -> StepPlan:
    """The plan of one supervised step; its n_sampled counts target tokens."""
    rows = [
        SegmentRow(
            segment_id=segment.segment_id,
            rollout_id=segment.rollout_id,
            group_id=segment.group_id,
            prompt_index=segment.prompt_index,
            lsn=cursor,
            n_tokens=segment.n_tokens,
            n_sampled=segment.n_trainable,
            version_min=None,
            version_max=None,
            reward=None,
            outcome=None,
            is_truncated=False,
        )
        for segment in segments
    ]
    return plan_step(
        rows,
        step=step,
        policy_version=policy_version,
        seed=seed,
        num_ranks=num_ranks,
        micro_batch_tokens=micro_batch_tokens,
        cursor=cursor,
    )


def places_of_step(order: PromptOrder, step: int, batch_size: int, *, num_passes: int | None = None) -> list[tuple[int, int]]:
    """(conversation, pass) of each place of a step: every conversation once in each pass, in a seeded order.

    A step that would begin the next pass with a conversation it already holds takes it once, so a segment is never twice in a batch.
    num_passes: the last step takes what is left of them; without end when absent.
    """
    end = (step + 1) * batch_size if num_passes is None else min((step + 1) * batch_size, num_passes * order.num_prompts)
    found: dict[int, int] = {}
    for position in range(step * batch_size, end):
        place = order.place(position)
        found.setdefault(place.prompt_index, place.epoch)
    return list(found.items())


def read_conversations(file: str, *, setting: str = "sft.dataset", messages_key: str = "messages") -> list[Conversation]:
    """Message lists of a JSONL or Parquet file or a data set folder. DataError names the row."""
    return [shown.messages for shown in read_demonstrations(file, setting=setting, messages_key=messages_key)]


def read_demonstrations(file: str, *, setting: str, messages_key: str) -> list[Demonstration]:
    """Messages of each row, and its tools where it has any. DataError names the row."""
    found: list[Demonstration] = []
    for row in read_rows(file, setting):
        if row.values is None:
            raise DataError(f"{row.place}: {row.problem}; mend or remove the row")
        if messages_key not in row.values:
            raise DataError(f"{row.place}: no key {messages_key!r}; it has {', '.join(row.values)}; set data.messages_key")
        try:
            messages = normal_messages(told_as_text(row.values[messages_key]), messages_key)
            found.append(Demonstration(messages=messages, tools=tools_of(row.values.get(TOOLS_KEY))))
        except ValueError as error:
            raise DataError(f"{row.place}: {error}") from error
    if not found:
        raise DataError(f"{setting}={file} holds no row; give at least one conversation")
    return found


def _spans(is_target_T: np.ndarray) -> list[Span]:
    """Spans of one conversation; a turn is a run of targets."""
    spans, turn = [], 0
    for is_target, run in groupby(is_target_T.tolist()):
        source = TokenSource.DEMONSTRATION if is_target else TokenSource.TEMPLATE
        spans.append(Span(len=sum(1 for _ in run), source=source, trainable=is_target, turn=turn))
        turn += is_target
    return spans


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
