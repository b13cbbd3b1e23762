"""Groups from dispatch to training as the log tells it, and the standing of a run after a kill."""

from __future__ import annotations

import json

import pytest

from molt.admission.decide import AdmissionRule, Decision
from molt.admission.inbox import Inbox
from molt.admission.plan import SegmentRow, plan_step, plan_to_json
from molt.admission.recover import SEGMENT_COLUMNS, stand

RULE = AdmissionRule(max_lag=1, group_size=2, drop_incomplete=True, filter_range=None)


def row(group: int, member: int, lsn: int, *, version: int = 0, segment: int = 0) -> SegmentRow:
    rollout_id = f"e0-p{group}/{member}/0"
    return SegmentRow(
        segment_id=f"{rollout_id}/{segment}", rollout_id=rollout_id, group_id=f"e0-p{group}", prompt_index=group, lsn=lsn, n_tokens=5,
        n_sampled=3, version_min=version, version_max=version, reward=1.0, outcome=None, is_truncated=False,
    )  # fmt: skip


def test_group_is_ready_only_when_every_member_finished_and_rows_twice_change_nothing():
    inbox = Inbox(rule=RULE)
    inbox.dispatch("e0-p0")
    inbox.take_in([row(0, 0, 1), row(0, 0, 1)])
    assert inbox.decide(0) == [] and inbox.num_running == 1 and not inbox.ready
    inbox.take_in([row(0, 1, 2), row(0, 1, 2)])
    assert inbox.decide(0) == [] and len(inbox.ready["e0-p0"].segments) == 2
    inbox.take_in([row(0, 1, 2)])  # late echo of a decided group
    segments, verdicts = inbox.pick(1, 0)
    assert (len(segments), [v.decision for v in verdicts]) == (2, [Decision.ADMITTED])
    assert (inbox.num_running, inbox.num_consumed, inbox.cursor) == (0, 1, 2)


def test_failed_member_drops_the_group_once_with_its_reason():
    inbox = Inbox(rule=RULE)
    inbox.dispatch("e0-p0")
    inbox.take_in([row(0, 0, 1)])
    inbox.fail("e0-p0", 1)
    (verdict,) = inbox.decide(0)
    assert (verdict.decision, verdict.num_failed, verdict.n_sampled) == (Decision.INCOMPLETE, 1, 3)
    assert inbox.decide(0) == [] and inbox.num_running == 0


def test_group_that_is_kept_without_a_failed_member_says_so_when_it_is_admitted():
    inbox = Inbox(rule=AdmissionRule(max_lag=1, group_size=2, drop_incomplete=False, filter_range=None))
    inbox.dispatch("e0-p0")
    inbox.take_in([row(0, 0, 0)])
    inbox.fail("e0-p0", 1)
    assert inbox.decide(0) == []
    _, (verdict,) = inbox.pick(1, 0)
    assert (verdict.decision, verdict.num_rollouts, verdict.num_failed) == (Decision.ADMITTED, 1, 1)


@pytest.mark.parametrize("group_size", [1, 3])
def test_group_that_was_sent_before_is_as_large_as_it_was_then(group_size: int):
    """Sent with two members; the resumed run sends groups of one, or of three."""
    inbox = Inbox(rule=AdmissionRule(max_lag=1, group_size=group_size, drop_incomplete=True, filter_range=None))
    table = [{name: getattr(row(0, 0, 0), name) for name in SEGMENT_COLUMNS}]
    standing = stand(table, [dispatched(0)], inbox=inbox, from_step=0, num_prompts=10)
    assert [(m.group_id, m.member) for m in standing.open_members] == [("e0-p0", 1)]
    assert (inbox.size_of("e0-p0"), inbox.size_of("e0-p1")) == (2, group_size)
    inbox.take_in([row(0, 1, 1)])
    assert inbox.decide(0) == [] and list(inbox.ready) == ["e0-p0"]
    _, (verdict,) = inbox.pick(1, 0)
    assert (verdict.decision, verdict.num_rollouts) == (Decision.ADMITTED, 2)


def test_peek_names_what_pick_would_take_and_changes_nothing():
    inbox = Inbox(rule=RULE)
    for group, version in ((0, 0), (1, 2), (2, 1)):
        inbox.dispatch(f"e0-p{group}")
        inbox.take_in([row(group, member, group * 2 + member, version=version) for member in range(2)])
    inbox.decide(1)
    assert list(inbox.peek(2, 2)) == ["e0-p2", "e0-p1"]  # group 0 would be two versions old, group 2 is the oldest that may train
    assert list(inbox.peek(5, 2)) == ["e0-p2", "e0-p1"] and len(inbox.ready) == 3
    segments, _ = inbox.pick(2, 2)
    assert [segment.group_id for segment in segments] == ["e0-p2", "e0-p2", "e0-p1", "e0-p1"]


def test_group_that_aged_while_waiting_is_dropped_as_stale_and_oldest_goes_first():
    inbox = Inbox(rule=RULE)
    for group, version in ((0, 0), (1, 2), (2, 1)):
        inbox.dispatch(f"e0-p{group}")
        inbox.take_in([row(group, member, group * 2 + member, version=version) for member in range(2)])
    assert inbox.decide(2) == []
    segments, verdicts = inbox.pick(1, 2)
    assert {s.group_id for s in segments} == {"e0-p2"}  # group 0 has lag 2 > 1; of the others group 2 is older
    assert [(v.group_id, v.decision) for v in verdicts] == [("e0-p0", Decision.STALE), ("e0-p2", Decision.ADMITTED)]


def event(kind: str, **body) -> dict:
    return {"kind": kind, "body": json.dumps(body)}


def dispatched(group: int) -> dict:
    return event(
        "group_dispatched", group_id=f"e0-p{group}", epoch=0, order_index=group, prompt_index=group, prompt_id=f"id{group}",
        group_size=2, members=[0, 1], purpose="train",
    )  # fmt: skip


def test_standing_after_a_kill_names_plans_to_train_again_and_members_to_generate():
    rows = [row(g, m, g * 2 + m) for g in range(3) for m in range(2)] + [row(3, 0, 6)]
    plans = [
        plan_step(rows[2 * g : 2 * g + 2], step=g, policy_version=g, seed=0, num_ranks=1, micro_batch_tokens=64, cursor=2 * g + 1)
        for g in range(2)
    ]
    events = [dispatched(g) for g in range(5)]
    events += [event("batch_planned", plan=plan_to_json(plan)) for plan in plans]
    events += [event("step_trained", step=0, loss=0.5)]
    events += [event("rollout_failed", group_id="e0-p3", member=1, num_tries=1, is_final=False)]
    inbox = Inbox(rule=RULE)
    table = [{name: getattr(r, name) for name in SEGMENT_COLUMNS} for r in rows]
    standing = stand(table, events, inbox=inbox, from_step=1, num_prompts=10)
    assert standing.position == 5
    assert standing.plans == (plans[1],)
    assert list(standing.recorded) == [0]
    # group 2 is complete and unplanned; group 3 lacks member 1, whose first try failed; group 4 never began
    assert [(m.group_id, m.member, m.num_tries) for m in standing.open_members] == [("e0-p3", 1, 2), ("e0-p4", 0, 1), ("e0-p4", 1, 1)]
    assert inbox.decide(2) == [] and list(inbox.ready) == ["e0-p2"]
    assert inbox.num_consumed == 2
