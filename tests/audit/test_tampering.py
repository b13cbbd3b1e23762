"""A finished run with one thing changed: an invariant names each. Rows are edited as by one who makes their digests anew."""

from __future__ import annotations

import json

import pytest

OF_PLAN = "kind = 'batch_planned' and body->>'$.step' = '1'"
OF_STEP = "kind = 'step_trained' and body->>'$.step' = '0'"
OF_REFIT = "kind = 'weights_refit' and body->>'$.policy_version' = '1'"
LAST = "(select max(lsn) + 1 from events)"


def finished(log) -> None:
    """log.well() with the weights that each step made: m at the beginning, w0 and w1 after."""
    log.start()
    log.sql("update events set body = json_merge_patch(body, '{\"model_digest\": \"m\"}') where kind = 'attempt_started'")
    log.event("weights_refit", policy_version=0, step=-1, weights_digest="m", engines='{"embedded-0": "m"}')
    for index in (0, 1):
        log.dispatch(f"e0-p{index}", index)
        log.segment(f"e0-p{index}/0/0", versions=(index,))
        log.decide(f"e0-p{index}", "admitted")
        log.step(index, f"e0-p{index}/0/0/0")
        log.event("weights_refit", policy_version=index + 1, step=index, weights_digest=f"w{index}", engines='{"embedded-0": "x"}')
        patch = json.dumps({"weights_digest": f"w{index}"})
        log.sql(f"update events set body = json_merge_patch(body, '{patch}') where kind = 'step_trained' and body->>'$.step' = '{index}'")
    log.event("checkpoint_saved", step=2, policy_version=2, weights_digest="w1")


def in_plan(name: str, value: object) -> str:
    """SQL that changes a word in the plan of step 1, where it stands first."""
    inside = f"regexp_replace(body->>'$.plan', '\"{name}\": [^,}}]+', '\"{name}\": {json.dumps(value)}')"
    return f"update events set body = json_merge_patch(body, json_object('plan', {inside})) where {OF_PLAN}"


def in_body(where: str, **changes: object) -> str:
    """SQL that changes columns of an event."""
    return f"update events set body = json_merge_patch(body, '{json.dumps(changes)}') where {where}"


def doubled(table: str, where: str) -> str:
    """SQL that lets a row stand a second time, at the end."""
    return f"insert into {table} select * replace ({LAST} as lsn) from {table} where {where}"


SEGMENT, PLANNED = "e0-p1/0/0/0", "segment_id = 'e0-p1/0/0/0'"
EDITS = {
    "reward of a rollout": (f"update segments set reward = 0.5 where {PLANNED}", "plans_as_rows", "other in the plan: reward"),
    "outcome of a rollout": (f"update segments set outcome = 0.5 where {PLANNED}", "plans_as_rows", "other in the plan: outcome"),
    "truncation": (f"update segments set is_truncated = true where {PLANNED}", "plans_as_rows", "other in the plan: is_truncated"),
    "reward in a plan": (in_plan("reward", 0.25), "plans_as_rows", "other in the plan: reward"),
    "version in a plan": (in_plan("version_min", 0), "plans_as_rows", "other in the plan: version_min"),
    "seed in a plan": (in_plan("seed", 5), "plans_as_rows", "the plan does not hold its own: seed"),
    "groups of a plan": (in_body(OF_PLAN, groups=["e0-p9"]), "plans_as_rows", "the plan does not hold its own: groups"),
    "a planned row goes": (f"delete from segments where {PLANNED}", "plans_as_rows", "it is not in the log"),
    "version of a plan": (in_body(OF_PLAN, policy_version=0), "steps_whole", "planned under version 0, made under 1"),
    "version of a step": (in_body(OF_STEP, policy_version=3), "steps_whole", "policy version falls from 3 to 1"),
    "version of a score": (f"update scores set policy_version = 7 where {PLANNED}", "steps_whole", "scored under version 7"),
    "version of a use": (f"update consumption set policy_version = 7 where {PLANNED}", "steps_whole", "consumed under version 7"),
    "rank of a score": (f"update scores set rank = 3 where {PLANNED}", "steps_whole", "scored by rank 3, consumed as of rank 0"),
    "a step goes": (f"delete from events where {OF_STEP}", "steps_whole", "attempt 1 consumed rows and does not tell of the step"),
    "a step goes, the hole": (f"delete from events where {OF_STEP}", "steps_whole", "absent: the next one that counts is 1"),
    "a step twice": (doubled("events", OF_STEP), "steps_whole", "attempt 1 tells its outcome 2 times"),
    "a plan twice": (doubled("events", OF_PLAN), "steps_whole", "attempt 1 plans it 2 times"),
    "a score twice": (doubled("scores", PLANNED), "steps_whole", f"attempt 1 scores {SEGMENT} 2 times"),
    "a gate twice": (doubled("events", "kind = 'gate_decided' and step = 1"), "steps_whole", f"attempt 1 gates {SEGMENT} 2 times"),
    "weights of a step": (in_body(OF_STEP, weights_digest="v"), "weights_follow", "after step 0 the weights were v, not w0"),
    "weights of a refit": (in_body(OF_REFIT, weights_digest="v"), "weights_follow", "after step 0 the weights were w0, not v"),
    "weights at the beginning": (
        in_body("kind = 'attempt_started'", model_digest="v"),
        "weights_follow",
        "at the beginning the weights were v, not m",
    ),
    "checkpoint of another run": (
        in_body("kind = 'checkpoint_saved'", weights_digest="v"),
        "weights_follow",
        "after step 1 the weights were w1, not v",
    ),
    "a refit goes": (f"delete from events where {OF_REFIT}", "weights_follow", "sampled with, and no refit brought it"),
    "prompt": (f"update segments set prompt_id = 'q' where {PLANNED}", "rollouts_as_sent", "not as sent or set: prompt_id"),
    "member": (f"update segments set member = 4 where {PLANNED}", "rollouts_as_sent", "not as sent or set: member, rollout_id"),
    "temperature": (f"update segments set temperature = 0.5 where {PLANNED}", "rollouts_as_sent", "not as sent or set: temperature"),
    "tokenizer": (f"update segments set tokenizer_digest = 'q' where {PLANNED}", "rollouts_as_sent", "2 tokenizers and 1 chat templates"),
    "an admission goes": (
        "delete from events where kind = 'group_decided' and group_id = 'e0-p1'",
        "causes_before_effects",
        "its admission",
    ),
    "an event goes": ("delete from events where kind = 'weights_refit' and step = 1", "rows_in_order", "1 rows are missing"),
    "a place twice": (f"update scores set lsn = 1 where {PLANNED}", "rows_in_order", "2 rows"),
    "a row of another run": (f"update segments set run = 'other' where {PLANNED}", "rows_in_order", "rows of the runs other, r"),
    "the beginning goes": ("delete from events where kind = 'attempt_started'", "rows_in_order", "2 rows, and the attempt never began"),
    "kept tokens of a use": (f"update consumption set n_kept = 1 where {PLANNED}", "lengths_agree", "kept by the gate"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edit_of_a_finished_run_is_named(log, name: str) -> None:
    edit, question, fault = EDITS[name]
    finished(log)
    assert log.rows(question) == []
    log.sql(edit)
    assert any(fault in str(row) for row in log.rows(question)), log.rows(question)


def test_segments_that_a_plan_took_out_of_their_order_are_found(log) -> None:
    """Discounts and values run over the segments of a rollout."""
    log.start()
    log.dispatch()
    ids = [log.segment("e0-p0/0/0", segment_index=index, num_segments=3) for index in range(3)]
    log.decide("e0-p0", "admitted")
    log.plan(0, [ids[0], ids[2], ids[1]])
    log.sql("update events set body = json_merge_patch(body, '{\"num_rollouts\": 1}') where kind = 'batch_planned'")
    faults = [row[2:] for row in log.rows("plans_as_rows") if row[2] is not None]
    assert faults == [(ids[1], "it stands behind a later segment of its rollout")]


def test_rows_that_a_repair_told_lost_leave_no_gap(log) -> None:
    finished(log)
    (lsn,) = log.sql("select lsn from scores order by lsn limit 1")[0]
    log.sql(f"delete from scores where lsn = {lsn}")
    assert log.rows("rows_in_order") == [(f"lsn {lsn}..{lsn}", "1 rows are missing and no repair told so")]
    log.event("rows_lost", table_name="scores", lsn_runs=f"[[{lsn}, {lsn}]]", num_rows=1)
    assert log.rows("rows_in_order") == []


def test_step_made_again_after_a_resume_is_whole(log) -> None:
    """Attempt 2 goes on from step 1: its refit and its checkpoint are held to its own weights."""
    finished(log)
    log.start(attempt=2, resumed_from_step=1)
    log.step(1, SEGMENT)
    patch = json.dumps({"weights_digest": "u1"})
    log.sql(f"update events set body = json_merge_patch(body, '{patch}') where kind = 'step_trained' and attempt = 2")
    log.event("weights_refit", policy_version=2, step=1, weights_digest="u1", engines="{}")
    log.event("checkpoint_saved", step=2, policy_version=2, weights_digest="u1")
    for question in ("steps_whole", "weights_follow", "plans_as_rows", "rows_in_order"):
        assert log.rows(question) == []


def test_version_that_lasts_for_two_steps_is_given_again_between_them(log) -> None:
    """To an engine that took a dead one's place, or that forgot it in its sleep."""
    log.start()
    log.sql("update events set body = json_merge_patch(body, '{\"model_digest\": \"m\"}') where kind = 'attempt_started'")
    refit = {"policy_version": 0, "engines": "{}"}
    log.event("weights_refit", step=-1, weights_digest="m", **refit)
    for step in (0, 1):
        log.trained(step)
        patch = json.dumps({"weights_digest": f"w{step}", "policy_version": 0})
        log.sql(f"update events set body = json_merge_patch(body, '{patch}') where kind = 'step_trained' and body->>'$.step' = '{step}'")
        if step == 0:
            log.event("weights_refit", step=0, weights_digest="m", **refit)
    log.event("weights_refit", step=1, weights_digest="w1", **refit | {"policy_version": 1})
    assert log.rows("weights_follow") == []
    log.event("weights_refit", step=1, weights_digest="w0", **refit | {"policy_version": 1})
    assert [row[2] for row in log.rows("weights_follow")] == ["after step 1 the weights were w1, not w0"]


def test_questions_about_plans_answer_in_parts_as_over_the_whole(log, monkeypatch) -> None:
    """Each plan by itself, and both together; a use without any plan belongs to no part and is told all the same."""
    finished(log)
    log.sql(in_plan("reward", 0.25))
    log.sql("update consumption set position = 5 where step = 0")
    log.trained(7)
    log.consume(SEGMENT, 7)
    whole = {name: log.rows(name) for name in ("plans_as_rows", "trained_as_planned")}
    assert [row[1:] for row in whole["plans_as_rows"]] == [(1, SEGMENT, "other in the plan: reward")]
    faults = {(row[0], row[2]) for row in whole["trained_as_planned"]}
    assert faults == {(0, "trained on another place than planned"), (7, "trained without a plan")}
    for num_places in (1, 2):
        monkeypatch.setattr("molt.audit.questions.PART_PLACES", num_places)
        for name, rows in whole.items():
            assert sorted(log.rows(name), key=str) == sorted(rows, key=str)
    assert log.sql("select count(*) from shown_plans") == [(2,)]
