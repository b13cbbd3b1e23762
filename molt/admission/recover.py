"""What the log says about where a run stands: the cursor over prompts, groups in flight, plans to train again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from molt.admission.inbox import Inbox
from molt.admission.order import PromptOrder, next_position
from molt.admission.plan import SegmentRow, StepPlan, plan_from_json
from molt.errors import DataError

SEGMENT_COLUMNS = (
    "segment_id", "rollout_id", "group_id", "prompt_index", "lsn", "n_tokens", "n_sampled", "version_min", "version_max",
    "reward", "outcome", "is_truncated",
)  # fmt: skip
"""The scalars that the trainer's leader reads of a segment; never a token column."""
EVENT_KINDS = ("group_dispatched", "group_decided", "rollout_failed", "batch_planned", "step_trained")
"""Kinds of events that recovery reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMember:
    """A rollout that was dispatched and neither finished nor failed for good."""

    group_id: str
    prompt_index: int
    epoch: int
    order_index: int
    prompt_id: str
    member: int
    num_tries: int
    """Tries that are over or lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands."""

    position: int
    """First place in the order of prompts that was never dispatched."""
    plans: tuple[StepPlan, ...]
    """Plans from the checkpoint on, in order of steps: they are trained again, from the log."""
    recorded: Mapping[int, dict[str, Any]]
    """step_trained of those steps that were trained before, by step."""
    open_members: tuple[OpenMember, ...]


def segment_rows(rows: Iterable[Mapping[str, Any]]) -> list[SegmentRow]:
    """Rows of the segments table as the leader's scalars."""
    return [SegmentRow(**{name: row[name] for name in SEGMENT_COLUMNS}) for row in rows]


def check_order(events: Iterable[Mapping[str, Any]], order: PromptOrder, prompt_ids: Sequence[str]) -> None:
    """DataError where prompts that were sent stand elsewhere in this order, or are other ones: some would be skipped, others doubled.

    events: of EVENT_KINDS. prompt_ids: of the prompts of now.
    """
    for row in events:
        body = json.loads(row["body"]) if row["kind"] == "group_dispatched" else {}
        if body.get("purpose") != "train":
            continue
        place = order.place(body["epoch"] * order.num_prompts + body["order_index"])
        if (place.group_id, prompt_ids[place.prompt_index]) != (body["group_id"], body["prompt_id"]):
            raise DataError(
                f"data.prompt_dataset: group {body['group_id']} was sent as prompt {body['prompt_id']}, on its place stands now "
                f"{place.group_id} with prompt {prompt_ids[place.prompt_index]} of {len(prompt_ids)}; "
                "go on with the prompts and the run.seed that the run began with, or begin a new run from its exported model"
            )


def stand(
    segments: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], *, inbox: Inbox, from_step: int, num_prompts: int
) -> Standing:
    """Read the scalars of purpose train and the events of EVENT_KINDS, both in lsn order; fill the inbox; say where the run stands.

    A later attempt repeats the plans of an earlier one, so the newest plan of a step is the plan of the step.
    """
    dispatched: dict[str, dict[str, Any]] = {}
    tries: Counter[tuple[str, int]] = Counter()
    final: set[tuple[str, int]] = set()
    dropped: set[str] = set()
    plans: dict[int, StepPlan] = {}
    recorded: dict[int, dict[str, Any]] = {}
    for row in events:
        body = json.loads(row["body"])
        match row["kind"]:
            case "group_dispatched" if body["purpose"] == "train":
                dispatched.setdefault(body["group_id"], body)
            case "group_decided" if body["decision"] != "admitted":
                dropped.add(body["group_id"])
            case "rollout_failed":
                member = (body["group_id"], body["member"])
                tries[member] = max(tries[member], body["num_tries"])
                if body["is_final"]:
                    final.add(member)
            case "batch_planned":
                plan = plan_from_json(body["plan"])
                plans[plan.step] = plan
            case "step_trained":
                recorded[body["step"]] = body
    planned = {row.group_id for plan in plans.values() for row in plan.segments}
    for group_id, body in dispatched.items():
        if group_id not in dropped and group_id not in planned:
            inbox.dispatch(group_id, body["group_size"])
    inbox.take_in(segment_rows(segments))
    for group_id, lost in final:
        inbox.fail(group_id, lost)
    inbox.num_consumed = len(planned)
    return Standing(
        position=next_position(((body["epoch"], body["order_index"]) for body in dispatched.values()), num_prompts),
        plans=tuple(plans[step] for step in sorted(plans) if step >= from_step),
        recorded=recorded,
        open_members=_open_members(inbox, dispatched, tries),
    )


def _open_members(inbox: Inbox, dispatched: Mapping[str, dict[str, Any]], tries: Counter[tuple[str, int]]) -> tuple[OpenMember, ...]:
    return tuple(
        OpenMember(
            group_id=group_id,
            prompt_index=dispatched[group_id]["prompt_index"],
            epoch=dispatched[group_id]["epoch"],
            order_index=dispatched[group_id]["order_index"],
            prompt_id=dispatched[group_id]["prompt_id"],
            member=member,
            num_tries=tries[(group_id, member)] + 1,
        )
        for group_id, group in inbox.open.items()
        for member in group.missing
    )
