"""Each invariant on a few literal rows: empty on a run in order, and the answer written out where a rule is broken."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from molt.audit.questions import ask_question, load_questions, read_question
from molt.errors import SettingError
from molt.log.rows import Medium, Payload, Span, TokenSource
from molt.places import folder

P, U = TokenSource.POLICY, TokenSource.USER
INVARIANTS = sorted(name for name, question in load_questions().items() if question.is_invariant)


def test_required_invariants_are_there() -> None:
    required = {
        "mask_only_sampled",
        "trainable_has_lineage",
        "lengths_agree",
        "lag_within_bound",
        "trained_once",
        "versions_live",
        "versions_ordered",
        "groups_complete",
        "reward_once",
        "tokens_close",
        "gates_recomputed",
    }
    assert required <= set(INVARIANTS)


@pytest.mark.parametrize("name", INVARIANTS)
def test_invariant_is_empty_on_a_run_in_order(log, name) -> None:
    log.well()
    assert log.rows(name) == []


@pytest.mark.parametrize("name", INVARIANTS)
def test_invariant_is_empty_on_an_empty_log(log, name) -> None:
    assert log.rows(name) == []


@pytest.mark.parametrize("path", sorted(folder("queries").glob("*.sql")), ids=lambda path: path.stem)
def test_query_keeps_the_form(path) -> None:
    question = read_question(path)
    assert question.english[0].isupper()
    body = [line for line in path.read_text().splitlines() if not line.startswith("--")]
    assert body[0].startswith("with ")
    assert max(map(len, path.read_text().splitlines())) <= 180


def test_file_that_breaks_the_form_is_named(tmp_path) -> None:
    path = tmp_path / "bad.sql"
    path.write_text("-- A statement.\n-- parameters: none\n-- grain: one\nselect 1\n")
    with pytest.raises(SettingError, match=r"bad\.sql, line 1 is not a question"):
        read_question(path)


def test_trainable_user_token_is_found(log) -> None:
    log.well()
    spans = [
        Span(len=2, source=TokenSource.USER, trainable=True),
        Span(len=2, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0),
    ]
    log.segment("e0-p1/1/0", spans=spans)
    assert log.rows("mask_only_sampled") == [("e0-p1/1/0/0", 0, "trainable, but its source is user")]


def test_logprob_on_a_user_token_is_found(log) -> None:
    log.well()
    log.segment("e0-p1/1/0", behaviour_logprobs=np.array([-1, np.nan, -0.5, -0.5], np.float32))
    assert log.rows("mask_only_sampled") == [("e0-p1/1/0/0", 0, "a log-prob on a token that was not sampled")]


def test_weight_on_a_sampled_token_that_may_not_train_is_found(log) -> None:
    log.start()
    spans = [
        Span(len=2, source=TokenSource.USER),
        Span(len=1, source=TokenSource.POLICY, policy_version=0, kv_version=0),
        Span(len=1, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0),
    ]
    segment_id = log.segment(spans=spans)
    log.score(segment_id, 0, weights=(0.5, 1.0))
    assert log.rows("mask_only_sampled") == [(segment_id, None, "1 gate weights on tokens that may not train")]


def test_logprob_of_a_trainable_token_that_is_not_finite_is_found(log) -> None:
    segment_id = log.segment(behaviour_logprobs=np.array([np.nan, np.nan, -np.inf, -0.5], np.float32))
    assert log.rows("trainable_has_lineage") == [(segment_id, "behaviour log-prob is not finite", 1)]


def test_trainable_token_without_logprob_or_version_is_found(log) -> None:
    log.well()
    log.segment("e0-p1/1/0", behaviour_logprobs=np.array([np.nan, np.nan, -0.5, np.nan], np.float32))
    spans = [Span(len=2, source=TokenSource.USER), Span(len=2, source=TokenSource.POLICY, trainable=True)]
    log.segment("e0-p1/2/0", spans=spans)
    assert sorted(log.rows("trainable_has_lineage")) == [
        ("e0-p1/1/0/0", "no behaviour log-prob", 1),
        ("e0-p1/2/0/0", "no policy version", 2),
    ]


def test_lengths_that_differ_are_found(log) -> None:
    log.well()
    segment_id = log.segment("e0-p1/1/0", replaced={"n_sampled": 3})
    log.consume(segment_id, 2, n_sampled=4)
    assert sorted(log.rows("lengths_agree")) == [
        (segment_id, "consumption", 4, 3),
        (segment_id, "sampled tokens in spans", 2, 3),
    ]


def test_image_that_grew_from_turn_to_turn_is_found(log) -> None:
    log.well()
    for number, length in enumerate((7, 7, 28)):
        media = [
            Medium(name="image", payload_digest="a" * 32, position=1, len=length),
            Medium(name="image", payload_digest="b" * 32, position=9, len=7),
        ]
        log.segment(f"e0-p{number + 1}/0/0", media=media)
    assert log.rows("images_alike") == [("a" * 32, 7, 28, 3, "e0-p1/0/0/0")]


def test_payload_that_nobody_stored_is_found(log) -> None:
    log.well()
    picture = Payload(kind="image", data=b"png")
    log.add("payloads", picture)
    media = [Medium(name="image", payload_digest=digest, position=0, len=2) for digest in (picture.payload_digest, "f" * 32)]
    segment_id = log.segment("e0-p1/1/0", media=media, routing_digest="e" * 32)
    assert sorted(log.rows("payloads_there")) == [(segment_id, "image", "f" * 32), (segment_id, "routing", "e" * 32)]


def test_segment_older_than_the_bound_is_found(log) -> None:
    log.well()
    # Weights of version 2, oldest token of version 0: lag 2, over the bound of 1.
    log.step(2, log.segment("e0-p1/1/0"), lag=2)
    assert log.rows("lag_within_bound") == [(1, 2, "e0-p1/1/0/0", 2, 2, 1, "older than the bound")]


def test_plan_trained_again_is_held_to_the_bound_under_which_it_was_admitted(log) -> None:
    log.well()
    log.start(attempt=2, resumed_from_step=1, max_lag=0)
    log.step(1, "e0-p1/0/0/0", lag=1)  # admitted by attempt 1, whose bound is 1
    assert log.rows("lag_within_bound") == []
    log.dispatch("e0-p2", 2)
    old = log.segment("e0-p2/0/0", versions=(1,))
    log.decide("e0-p2", "admitted")
    log.step(2, old, lag=1)  # version 2 less 1, over the bound of 0
    assert log.rows("lag_within_bound") == [(2, 2, "e0-p2/0/0/0", 1, 1, 0, "older than the bound")]


def test_recorded_lag_that_is_not_the_segments_is_found(log) -> None:
    log.well()
    log.step(1, log.segment("e0-p1/1/0"), lag=0)
    assert log.rows("lag_within_bound") == [(1, 1, "e0-p1/1/0/0", 0, 1, 1, "recorded lag differs")]


def test_second_use_that_was_not_declared_is_found(log) -> None:
    log.well()
    log.consume("e0-p0/0/0/0", 1, use_number=2, lag=1)
    assert log.rows("trained_once") == [("e0-p0/0/0/0", 2, 1, [0, 1])]


def test_step_trained_again_after_a_resume_counts_once(log) -> None:
    log.well()
    log.start(attempt=2, resumed_from_step=1)
    log.score("e0-p1/0/0/0", 1)
    log.gate("e0-p1/0/0/0", 1)
    log.trained(1)
    log.consume("e0-p1/0/0/0", 1, lag=1)
    assert log.sql("select attempt, step from counted_consumption order by step") == [(1, 0), (2, 1)]
    for name in INVARIANTS:
        assert log.rows(name) == [], name
    # 4 sampled tokens, each trained once.
    assert log.rows("ledger") == [("generated", "", 4, 2), ("trained", "", 4, 2)]


def test_step_voided_by_a_resume_and_not_yet_trained_again_is_open(log) -> None:
    log.well()
    log.start(attempt=2, resumed_from_step=1)
    assert log.rows("ledger") == [("generated", "", 4, 2), ("trained", "", 2, 1), ("open", "admitted", 2, 1)]


def test_resume_from_the_beginning_voids_every_step(log) -> None:
    log.well()
    log.start(attempt=2, resumed_from_step=0)
    assert log.sql("select count(*) from counted_consumption") == [(0,)]


def test_third_attempt_voids_what_the_second_trained(log) -> None:
    log.start()
    log.dispatch()
    segment_id = log.segment()
    log.step(0, segment_id)
    for attempt in (2, 3):
        log.start(attempt=attempt, resumed_from_step=0)
        log.consume(segment_id, 0)
    # Attempts 1 and 2 are void from step 0 on.
    assert log.sql("select attempt from counted_consumption") == [(3,)]


def test_retraining_in_another_batch_is_found(log) -> None:
    log.well()
    log.start(attempt=2, resumed_from_step=1)
    log.trained(1, batch_digest="other")
    assert log.rows("retrained_alike") == [(1, [1, 2], 2)]


def test_retraining_under_other_settings_may_differ(log) -> None:
    log.well()
    log.start(attempt=2, resumed_from_step=1)
    log.event("settings_changed", from_step=1, changed='{"fsdp.tp_size": [1, 2]}', is_exact=False)
    log.trained(1, batch_digest="other")
    assert log.rows("retrained_alike") == []
    log.start(attempt=3, resumed_from_step=1)  # as the second attempt was
    log.trained(1, batch_digest="a third")
    assert log.rows("retrained_alike") == [(1, [2, 3], 2)]


def test_version_before_its_weights_is_found(log) -> None:
    log.start()
    log.dispatch()
    first = log.segment("e0-p0/0/0", versions=(1,))
    log.trained(0)
    log.segment("e0-p0/1/0", versions=(0, 1))
    log.segment("e0-p0/2/0", versions=(7,))
    # Step 0 of version 0 makes version 1; its lsn is 3 (start 0, dispatch 1, segment 2).
    assert sorted(log.rows("versions_live")) == [(first, 1, 2, 3), ("e0-p0/2/0/0", 7, 5, None)]


def test_version_of_a_checkpoint_is_live(log) -> None:
    log.start()
    log.event("checkpoint_saved", step=3, policy_version=3, path="checkpoints/step_3", weights_digest="w", cursor=0, lsn_end=0)
    log.segment("e0-p0/0/0", versions=(3,))
    assert log.rows("versions_live") == []


def test_version_that_falls_is_found(log) -> None:
    log.segment("e0-p0/0/0", versions=(1, 0))
    assert log.rows("versions_ordered") == [("e0-p0/0/0/0", 4, "policy version falls from 1 to 0")]


@pytest.mark.parametrize(("setting", "is_found"), [("recompute", True), ("keep", False)])
def test_cache_of_older_weights_is_found_where_it_was_to_be_recomputed(log, setting: str, is_found: bool) -> None:
    log.event("attempt_started", config=json.dumps({"vllm": {"kv_on_refit": setting}}))
    spans = [Span(len=2, source=U), Span(len=2, source=P, trainable=True, policy_version=1, kv_version=0)]
    log.segment("e0-p0/0/0", versions=(1,), spans=spans)
    fault = "cache entries are older than the token: kv_version 0 under 1 with vllm.kv_on_refit=recompute"
    assert log.rows("versions_ordered") == ([("e0-p0/0/0/0", 2, fault)] if is_found else [])


def test_step_tells_the_lag_of_its_oldest_tokens_and_of_all(log) -> None:
    log.start()
    log.dispatch()
    # Two tokens of version 0, two of version 1, trained at version 1: the oldest lag by 1, all of them by (2 x 1 + 2 x 0) / 4.
    log.step(1, log.segment(versions=(0, 1)), lag=1)
    answer = ask_question(log.connection, load_questions()["steps"])
    found = dict(zip(answer.columns, answer.rows[0], strict=True))
    assert (found["lag_max"], found["token_lag_mean"]) == (1, 0.5)


def test_version_bounds_that_lie_are_found(log) -> None:
    log.segment("e0-p0/0/0", versions=(0, 1), replaced={"version_max": 0})
    assert log.rows("versions_ordered") == [("e0-p0/0/0/0", None, "version_min or version_max is not that of its spans")]


def test_group_that_trained_incomplete_is_found(log) -> None:
    log.start()
    log.dispatch(group_size=2)
    segment_id = log.segment(group_size=2)
    log.step(0, segment_id)
    assert log.rows("groups_complete") == [("e0-p0", "1 of 2 rollouts trained")]


def test_rollout_that_trained_without_a_segment_is_found(log) -> None:
    log.start()
    log.dispatch()
    log.step(0, log.segment(num_segments=2))
    log.segment(num_segments=2, segment_index=1)
    assert log.rows("groups_complete") == [("e0-p0/0/0", "1 of 2 segments trained")]


def test_groups_of_one_outcome_are_counted_by_step(log) -> None:
    """Group 0: two failures with other rewards, one in two segments. 1: right and wrong. 2: equal, a third unscored. 3: no score."""
    log.start()
    told = {0: [(0.0, 0.0), (0.1, 0.0)], 1: [(1.0, 1.0), (0.1, 0.0)], 2: [(1.0, None), (1.0, None), (None, 0.0)], 3: [(None, None)]}
    for place, members in told.items():
        for member, (reward, outcome) in enumerate(members):
            for index in range(2 if (place, member) == (0, 0) else 1):
                fields = {"reward": reward, "outcome": outcome, "segment_index": index, "num_segments": 2}
                log.consume(log.segment(f"e0-p{place}/{member}/0", **fields), place // 3)
    assert log.rows("one_outcome") == [(0, 3, 2, 1), (1, 1, 1, 0)]


def test_two_rewards_in_one_rollout_are_found(log) -> None:
    log.segment(num_segments=2, reward=1.0)
    log.segment(num_segments=2, segment_index=1, reward=0.0)
    assert log.rows("reward_once") == [("e0-p0/0/0", "2 different rewards")]


def test_missing_segment_and_a_finished_rollout_that_failed_are_found(log) -> None:
    log.segment("e0-p0/0/0", num_segments=2)
    log.segment("e0-p0/1/0")
    log.fail("e0-p0/1/0")
    assert sorted(log.rows("reward_once")) == [
        ("e0-p0/0/0", "1 segments in the log, 2 declared"),
        ("e0-p0/1/0", "finished and failed"),
    ]


def test_unscorable_reward_is_one_reward(log) -> None:
    log.segment(num_segments=2, reward=None)
    log.segment(num_segments=2, segment_index=1, reward=None)
    assert log.rows("reward_once") == []


def test_ledger_names_every_fate(log) -> None:
    log.start(is_correction_level="token")
    for index in range(6):
        log.dispatch(f"e0-p{index}", index, purpose="eval" if index == 5 else "train")
    trained = log.segment("e0-p0/0/0")
    log.segment("e0-p1/0/0")
    log.decide("e0-p1", "stale")
    refused = log.segment("e0-p2/0/0")
    log.fail("e0-p3/0/0", n_sampled=3)
    log.fail("e0-p3/0/1", n_sampled=1, reason="engine_error", is_final=False)
    log.segment("e0-p4/0/0")
    log.segment("e0-p5/0/0", purpose="eval")
    log.plan(0, [trained])
    log.trained(0, n_kept=1)
    log.consume(trained, 0, n_kept=1)
    log.plan(1, [refused])
    log.event("step_refused", step=1, reason="non_finite", error="loss is nan", n_sampled=2)
    log.event("calls_cut", rollout_id="e0-p0/0/0", group_id="e0-p0", member=0, n_sampled=5)
    # 5 segments of 2 sampled tokens, 3 + 1 tokens of failed tries, 5 of a call that was cut: 19.
    assert log.rows("ledger") == [
        ("generated", "", 19, 5),
        ("trained", "", 1, 1),
        ("gated", "outside the band", 1, 1),
        ("dropped", "refused: non_finite", 2, 1),
        ("dropped", "stale", 2, 1),
        ("failed", "agent_error", 3, 1),
        ("failed", "call cut", 5, 1),
        ("failed", "engine_error", 1, 1),
        ("evaluated", "", 2, 1),
        ("open", "not decided", 2, 1),
    ]
    assert log.rows("tokens_close") == []


def test_segment_dropped_and_trained_breaks_the_sum(log) -> None:
    log.well()
    log.decide("e0-p0", "stale")
    assert sorted(log.rows("tokens_close")) == [
        ("e0-p0/0/0/0", "2 fates: dropped stale, trained step"),
        ("the sum", "4 generated, 6 accounted for"),
    ]


def test_consumption_that_claims_other_tokens_breaks_the_sum(log) -> None:
    log.start()
    log.dispatch()
    log.consume(log.segment(), 0, n_sampled=5, n_kept=5)
    assert log.rows("tokens_close") == [("the sum", "2 generated, 5 accounted for")]


def test_denominator_that_does_not_add_up_is_found(log) -> None:
    log.start()
    log.dispatch()
    segment_id = log.segment()
    log.plan(0, [segment_id], n_sampled=2)
    log.trained(0, n_sampled=3)
    log.consume(segment_id, 0)
    assert sorted(log.rows("denominators_add_up")) == [(1, 0, "n_sampled of the plan", 2, 3), (1, 0, "n_sampled of the step", 3, 2)]


def test_training_beside_the_plan_is_found(log) -> None:
    log.start()
    log.dispatch(group_size=3)
    first, second, third = (log.segment(f"e0-p0/{member}/0") for member in range(3))
    log.plan(0, [first, second])
    log.trained(0)
    log.consume(first, 0, position=1)
    log.consume(third, 0)
    assert sorted(log.rows("trained_as_planned")) == [
        (0, first, "trained on another place than planned"),
        (0, second, "planned and left out"),
        (0, third, "trained without a plan"),
    ]


def test_effect_before_its_cause_is_found(log) -> None:
    log.start()
    log.consume("e0-p0/0/0/0", 0)
    log.segment()
    log.dispatch()
    # lsn: start 0, consumption 1, segment 2, dispatch 3.
    assert sorted(log.rows("causes_before_effects")) == [
        ("consumption of e0-p0/0/0/0 at step 0", "its scores", 1, None),
        ("consumption of e0-p0/0/0/0 at step 0", "its segment", 1, 2),
        ("segment e0-p0/0/0/0", "dispatch of its group", 2, 3),
    ]


def test_skipped_and_doubled_prompts_are_found(log) -> None:
    log.dispatch("e0-p0", 0)
    log.dispatch("e0-p3", 3)
    log.dispatch("e0-p9", 3)
    log.segment("e0-p0/0/0")
    log.segment("e0-p0/0/1")
    assert sorted(log.rows("prompts_in_order")) == [
        ("e0-p0 member 0", "finished 2 times: e0-p0/0/0, e0-p0/0/1"),
        ("epoch 0, place 1", "skipped"),
        ("epoch 0, place 3", "2 groups and 1 prompts on one place"),
    ]


def test_group_asked_for_again_after_a_resume_is_not_doubled(log) -> None:
    log.dispatch("e0-p0", 0)
    log.dispatch("e0-p0", 0)
    assert log.rows("prompts_in_order") == []


def test_engine_with_other_weights_is_found(log) -> None:
    log.start()
    log.event(
        "weights_refit",
        policy_version=1,
        step=0,
        weights_digest="aa",
        engines='{"vllm-0": "aa", "vllm-1": "bb"}',
        pause_s=0.1,
        transfer_s=0.1,
        verify_s=0.1,
        resume_s=0.1,
        size_bytes=1,
        num_in_flight=0,
    )
    assert log.rows("engines_agree") == [(1, 1, 0, 1, "vllm-1", "bb", "aa")]


E_02, E_09 = math.exp(0.2), math.exp(0.9)
"""Ratios of the two tokens below: trainer -0.3 and 0.4 against behaviour -0.5 and -0.5."""

GATES = [
    # level, mode, low, high, weights, n_kept
    ("off", "mask", None, None, (1.0, 1.0), 2),
    ("token", "mask", 0.5, 2.0, (E_02, 0.0), 1),  # e^0.9 = 2.46 is over 2
    ("token", "clip", 0.5, 2.0, (E_02, 2.0), 2),
    ("token", "trunc", None, 1.1, (1.1, 1.1), 2),  # e^0.2 = 1.22 is over 1.1 too
    ("seq", "mask", 0.5, 4.0, (math.exp(1.1), math.exp(1.1)), 2),  # product e^1.1 = 3.0
    ("seq", "mask", 0.5, 2.0, (0.0, 0.0), 0),
    ("seq", "clip", 0.5, 2.0, (2.0, 2.0), 2),
    ("geo", "mask", 0.5, 2.0, (E_02, E_09), 2),  # geometric mean e^0.55 = 1.73 keeps both, each with its own ratio
    ("geo", "mask", 0.5, 1.5, (0.0, 0.0), 0),
    ("geo", "clip", 0.5, 1.5, (1.5, 1.5), 2),
    ("geo", "trunc", None, 2.0, (math.exp(0.55), math.exp(0.55)), 2),
]


def gated(log, level, mode, low, high, weights, n_kept) -> None:
    log.start(is_correction_level=level, is_correction_mode=mode)
    log.dispatch()
    segment_id = log.segment()
    log.score(segment_id, 0, trainer=(-0.3, 0.4), weights=weights)
    log.gate(segment_id, 0, level=level, mode=mode, low=low, high=high, n_kept=n_kept)
    log.consume(segment_id, 0, n_kept=n_kept)


@pytest.mark.parametrize(("level", "mode", "low", "high", "weights", "n_kept"), GATES)
def test_gate_recomputed_by_hand_equals_the_recorded(log, level, mode, low, high, weights, n_kept) -> None:
    gated(log, level, mode, low, high, weights, n_kept)
    assert log.rows("gates_recomputed") == []


@pytest.mark.parametrize(("level", "mode", "low", "high", "weights", "n_kept"), GATES)
def test_gate_with_another_weight_or_count_is_found(log, level, mode, low, high, weights, n_kept) -> None:
    gated(log, level, mode, low, high, (weights[0] + 0.01, weights[1]), n_kept)
    ((_, _, segment_id, recorded, again, difference, fault),) = log.rows("gates_recomputed")
    assert (segment_id, recorded, again, fault) == ("e0-p0/0/0/0", n_kept, n_kept, "the decision differs")
    # 0.01 over the larger of weight and 1.
    assert difference == pytest.approx(0.01 / max(weights[0], 1), rel=1e-4)


def test_kept_count_that_is_not_the_gates_is_found(log) -> None:
    gated(log, "token", "mask", 0.5, 2.0, (E_02, 0.0), 2)
    ((_, _, _, recorded, again, _, _),) = log.rows("gates_recomputed")
    assert (recorded, again) == (2, 1)


def test_tv_gate_masks_by_probability(log) -> None:
    # |e^-0.5 - e^-0.3| = |0.6065 - 0.7408| = 0.134 is inside 0.2; trainer 0.4 is bounded to probability 1: 0.393 is outside.
    log.start(is_correction_level="token", gate="tv")
    segment_id = log.segment()
    log.score(segment_id, 0, trainer=(-0.3, 0.4), weights=(E_02, 0.0))
    log.gate(segment_id, 0, level="token", high=0.2, n_kept=1)
    assert log.rows("gates_recomputed") == []


def test_consumption_without_a_gate_decision_is_found(log) -> None:
    log.start()
    segment_id = log.segment()
    log.consume(segment_id, 0)
    assert log.rows("gates_recomputed") == [(1, 0, segment_id, None, None, None, "no decision was recorded")]


def test_decoupled_gate_has_a_band_for_each_part(log) -> None:
    # Trainer at version 1. Tokens of version 0 against 0.5 .. 2: e^0.2 = 1.22 in, e^0.9 = 2.46 out.
    # Tokens of version 1 are kernel mismatch, against 0.9 .. 1.1: e^0.05 = 1.05 in, e^0.2 = 1.22 out.
    log.start(is_correction_level="token", decoupled=True, is_mismatch_threshold=[0.9, 1.1])
    segment_id = log.segment(versions=(0, 1))
    weights = (E_02, 0.0, math.exp(0.05), 0.0)
    log.score(segment_id, 1, trainer=(-0.3, 0.4, -0.45, -0.3), weights=weights)
    log.gate(segment_id, 1, level="token", low=0.5, high=2.0, n_tokens=4, n_kept=2)
    assert log.rows("gates_recomputed") == []
    log.start(attempt=2, is_correction_level="token")
    log.score(segment_id, 1, trainer=(-0.3, 0.4, -0.45, -0.3), weights=weights)
    log.gate(segment_id, 1, level="token", low=0.5, high=2.0, n_tokens=4, n_kept=2)
    # Without decoupling the last token is inside 0.5 .. 2.
    assert [(row[0], row[3], row[4]) for row in log.rows("gates_recomputed")] == [(2, 2, 3)]


def test_question_in_parts_answers_as_over_the_whole_and_each_row_once(log, monkeypatch) -> None:
    log.start(is_correction_level="token")
    for place, weights in enumerate(((9.0, 0.0), (E_02, 0.0), (8.0, 0.0))):
        segment_id = log.segment(f"e0-p{place}/0/0")
        log.score(segment_id, 0, trainer=(-0.3, 0.4), weights=weights)
        log.gate(segment_id, 0, level="token", low=0.5, high=2.0, n_kept=1)
    log.consume(log.segment("e0-p3/0/0"), 0)  # never scored
    log.start(attempt=2, resumed_from_step=0, is_correction_level="token")  # group 0 trains again: its scores lie behind all others
    log.score("e0-p0/0/0/0", 0, trainer=(-0.3, 0.4), weights=(7.0, 0.0))
    log.gate("e0-p0/0/0/0", 0, level="token", low=0.5, high=2.0, n_kept=1)
    log.consume("e0-p3/0/0/0", 0)
    whole = log.rows("gates_recomputed")
    assert sorted((row[0], row[2], row[-1]) for row in whole) == [
        (2, "e0-p0/0/0/0", "the decision differs"),
        (2, "e0-p3/0/0/0", "no decision was recorded"),
    ]
    for n_tokens in (1, 8):  # segments of four tokens: one in each part, two in each part
        monkeypatch.setattr("molt.audit.questions.PART_TOKENS", n_tokens)
        assert sorted(log.rows("gates_recomputed"), key=str) == sorted(whole, key=str)
        assert log.sql("select count(*) from full_segments") == [(4,)]
    answer = ask_question(log.connection, load_questions()["gates_recomputed"], limit=1)
    assert len(answer.rows) == 1 and answer.is_cut
    assert log.sql("select count(*) from full_scores") == [(4,)]


def test_tokens_taken_out_on_purpose_are_no_fault(log) -> None:
    log.well()
    log.connection.execute("update segments set token_ids = [], behaviour_logprobs = [] where segment_id = 'e0-p0/0/0/0'")
    log.connection.execute("update scores set trainer_logprobs = [], advantages = [], gate_weights = [] where segment_id = 'e0-p1/0/0/0'")
    assert log.rows("lengths_agree") != [], "without a tombstone it is one"
    for table, segment_id in (("segments", "e0-p0/0/0/0"), ("scores", "e0-p1/0/0/0")):
        ((lsn,),) = log.sql(f"select lsn from {table} where segment_id = '{segment_id}'")
        log.event("rows_emptied", family="tokens", table_name=table, lsn_runs=f"[[{lsn}, {lsn}]]", num_rows=1)
    assert {name: log.rows(name) for name in INVARIANTS} == {name: [] for name in INVARIANTS}
    assert log.rows("ledger") == [("generated", "", 4, 2), ("trained", "", 4, 2)]
    assert log.sql("select count(*) from tokens") == [(4,)]


def test_rows_that_a_repair_lost_are_told(log) -> None:
    log.event(
        "rows_lost", table_name="scores", lsn_runs="[[3, 5]]", num_rows=3, files=["a.lance", "b.lance"], reason="a page fails its checksum"
    )
    assert log.rows("rows_lost") == [("scores", 3, "[[3, 5]]", "a.lance, b.lance", "a page fails its checksum")]
