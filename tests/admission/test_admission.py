"""Capacity, prompt order, group decisions and step plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.admission.balance import balance
from molt.admission.capacity import capacity
from molt.admission.decide import AdmissionRule, Decision, decide_group
from molt.admission.order import PromptOrder, next_position
from molt.admission.plan import SegmentRow, plan_from_json, plan_step, plan_to_json

RULE = AdmissionRule(max_lag=1, group_size=2, drop_incomplete=True, filter_range=None)


def row(member: int = 0, *, reward: float | None = 0.0, version: int | None = 0, segment: int = 0, n_tokens: int = 4, **kw) -> SegmentRow:
    rollout_id = f"e0-p0/{member}/0"
    fields = dict(
        segment_id=f"{rollout_id}/{segment}", rollout_id=rollout_id, group_id="e0-p0", prompt_index=0, lsn=member, n_tokens=n_tokens,
        n_sampled=2, version_min=version, version_max=version, reward=reward, outcome=None, is_truncated=False,
    )  # fmt: skip
    return SegmentRow(**{**fields, **kw})


def decide(rows, *, num_failed=0, version=0, rule=RULE):
    return decide_group("e0-p0", rows, num_failed=num_failed, policy_version=version, rule=rule)


def test_lag_zero_lets_one_batch_run_per_version():
    # (0 + 1) * 4 - (0 + 0) = 4 at the start; once 4 run, or trained under the same version, none may start.
    common = dict(max_lag=0, groups_per_version=4)
    assert capacity(num_consumed=0, num_running=0, **common) == 4
    assert capacity(num_consumed=0, num_running=4, **common) == 0
    assert capacity(num_consumed=4, num_running=0, **common) == 0


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 30))
def test_groups_trained_in_dispatch_order_never_exceed_the_lag_bound(max_lag, groups_per_version, num_versions):
    waiting: list[int] = []  # dispatch version of each running group
    version = 0
    while version < num_versions:
        room = capacity(max_lag=max_lag, groups_per_version=groups_per_version, num_consumed=0, num_running=len(waiting))
        waiting += [version] * room
        assert len(waiting) >= groups_per_version, "a step must always be possible"
        batch, waiting = waiting[:groups_per_version], waiting[groups_per_version:]
        assert all(version - born <= max_lag for born in batch)
        version += 1


def test_every_epoch_has_every_prompt_once_and_another_order():
    order = PromptOrder(num_prompts=50, seed=7)
    first = [order.place(i).prompt_index for i in range(50)]
    second = [order.place(i).prompt_index for i in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert order.place(63).group_id == f"e1-p{second[13]}"


def test_cursor_is_one_past_the_last_dispatched_and_a_hole_is_refused():
    assert next_position([], 3) == 0
    assert next_position([(0, 0), (0, 2), (0, 1), (1, 0)], 3) == 4
    with pytest.raises(AssertionError, match="hole"):
        next_position([(0, 0), (0, 2)], 3)


def test_group_reward_counts_each_rollout_once_however_many_segments():
    # rollout 0: five segments, reward 0; rollout 1: one segment, reward 1 -> mean 0.5, population deviation 0.5
    verdict = decide([row(0, segment=i) for i in range(5)] + [row(1, reward=1.0)])
    assert (verdict.decision, verdict.reward_mean, verdict.reward_std, verdict.num_rollouts) == (Decision.ADMITTED, 0.5, 0.5, 2)


def test_oldest_token_decides_staleness():
    assert decide([row(0, version=3), row(1, version=4)], version=4).decision == Decision.ADMITTED
    assert decide([row(0, version=2), row(1, version=4)], version=4).decision == Decision.STALE


def test_missing_members_make_a_group_incomplete_unless_kept():
    assert decide([row(0)], num_failed=1).decision == Decision.INCOMPLETE
    keep = AdmissionRule(max_lag=1, group_size=2, drop_incomplete=False, filter_range=None)
    assert decide([row(0)], num_failed=1, rule=keep).decision == Decision.ADMITTED
    assert decide([], num_failed=2, rule=keep).decision == Decision.FAILED


def test_filter_looks_at_the_outcome_and_not_at_the_shaped_reward():
    rule = AdmissionRule(max_lag=1, group_size=2, drop_incomplete=True, filter_range=(0.0, 1.0))
    shaped = [row(0, reward=0.0, outcome=0.0), row(1, reward=0.03, outcome=0.0)]  # all fail, length bonus differs
    assert decide(shaped, rule=rule).decision == Decision.FILTERED
    assert decide([row(0, outcome=0.0), row(1, outcome=1.0)], rule=rule).decision == Decision.ADMITTED
    assert decide([row(0, reward=None), row(1, reward=None)], rule=rule).decision == Decision.FILTERED


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 4))
def test_balance_places_every_segment_once_within_the_token_bound(lengths, num_ranks):
    ranks = balance(lengths, num_ranks=num_ranks, micro_batch_tokens=100)
    assert sorted(place for rank in ranks for batch in rank for place in batch) == list(range(len(lengths)))
    assert len({len(rank) for rank in ranks}) == 1
    assert all(sum(lengths[place] for place in batch) <= 100 for rank in ranks for batch in rank)
    loads = [sum(lengths[place] for batch in rank for place in batch) for rank in ranks]
    assert max(loads) - min(loads) <= max(lengths)


def test_segments_of_a_rollout_are_planned_in_the_order_in_which_they_came_about():
    """Discounts, penalties and values run over them; by name the eleventh, .../10, would stand before .../2."""
    rows = [row(segment=index) for index in (10, 2, 11, 0, 9, 1)]
    plan = plan_step(rows, step=0, policy_version=0, seed=0, num_ranks=1, micro_batch_tokens=64, cursor=0)
    assert [found.segment_index for found in plan.segments] == [0, 1, 2, 9, 10, 11]


def test_plan_does_not_depend_on_arrival_order_and_survives_json():
    rows = [row(member, segment=s, n_tokens=4 + member) for member in range(3) for s in range(2)]
    kw = dict(step=3, policy_version=2, seed=9, num_ranks=2, micro_batch_tokens=8, cursor=17)
    plan = plan_step(rows, **kw)
    assert plan == plan_step(rows[::-1], **kw)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert (plan.n_sampled, plan.num_rollouts, plan.num_groups) == (12, 3, 1)
