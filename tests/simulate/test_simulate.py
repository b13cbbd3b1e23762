"""Counterfactual bounds: hand-made histories with known outcomes, and a made log."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from molt.admission.plan import SegmentRow
from molt.config import Config
from molt.errors import SettingError
from molt.simulate.bias import distribution_bias, ks_p_value, mean_bias, welch_p_value
from molt.simulate.history import History, PastGroup, PastRollout, PastStep, _model_times, read_history
from molt.simulate.paced import play_paced
from molt.simulate.play import count_fates, play_recorded
from molt.simulate.run import predict, simulate_run
from tools.bench.made_run import make_run


def past(number: int, *, duration: float, sent: float = 0.0, version: int = 0, n_sampled: int = 10, reward: float = 1.0) -> PastGroup:
    """A group of one rollout."""
    row = SegmentRow(
        segment_id=f"e0-p{number}/0/0/0", rollout_id=f"e0-p{number}/0/0", group_id=f"e0-p{number}", prompt_index=number, lsn=number,
        n_tokens=n_sampled + 2, n_sampled=n_sampled, version_min=version, version_max=version, reward=reward, outcome=None,
        is_truncated=False,
    )  # fmt: skip
    return PastGroup(
        group_id=row.group_id,
        dispatched_at=sent,
        finished_at=sent + duration,
        version_dispatched=version,
        segments=(row,),
        rollouts=(PastRollout(rollout_id=row.rollout_id, wait_s=0.0, model_s=0.0, tool_s=duration, num_turns=1),),
        num_failed=0,
    )  # fmt: skip


def history(
    groups: list[PastGroup], *, num_steps: int, step_s: float = 2.0, groups_per_step: int = 2, every_s: float = 10.0, num_places: int = 64
) -> History:
    """Steps of groups_per_step groups; one version a step."""
    config = Config.model_validate(
        {"rollout": {"batch_size": groups_per_step, "n_samples_per_prompt": 1}, "train": {"batch_size": groups_per_step}}
    )
    steps = tuple(
        PastStep(
            step=i,
            policy_version=i,
            planned_at=every_s * (i + 1),
            duration_s=step_s,
            train_s=step_s,
            refit_s=0.0,
            num_groups=groups_per_step,
        )
        for i in range(num_steps)
    )
    return History(config=config, groups=tuple(groups), steps=steps, num_places=num_places, start_s=0.0, num_open=0)


def test_on_policy_waits_for_every_rollout():
    # bound 0: two groups of 5 s, a step of 2 s, and again: steps end at 7, 14, 21; the trainer stands still 5 s before the second and third
    found = predict(history([past(i, duration=5.0) for i in range(6)], num_steps=3), max_lag=0)
    assert (found.num_steps, found.elapsed_s, found.wait_s) == (3, 21.0, 10.0)
    assert (found.kept_share, found.lag_max) == (1.0, 0)


def test_one_version_ahead_hides_the_rollouts_behind_the_steps():
    # bound 1: four groups at once; steps end at 7 and 9 (all four were there), the next two were sent at 7: ready at 12, step ends at 14
    found = predict(history([past(i, duration=5.0) for i in range(6)], num_steps=3), max_lag=1)
    assert (found.num_steps, found.elapsed_s) == (3, 14.0)
    assert found.lag_max == 1
    assert found.wait_s == 3.0  # from 9 to 12


@pytest.mark.parametrize(("is_partial", "wait_s"), [(False, 0.0), (True, 3.0)])
def test_a_refit_waits_for_model_calls_unless_rollouts_are_partial(is_partial, wait_s):
    # four groups of one 5 s call at 0; training 5-7, refit 7-8; training 8-10 while two more calls run 8-13.
    # whole rollouts: the refit waits until 13, goes 13-14, training 14-16, refit 17, and nothing was waited for in between.
    # partial: refit 10-11, the calls end 1 s later at 14, the trainer stands still 11-14, training 14-16, refit 17
    groups = [past(i, duration=5.0) for i in range(6)]
    calls = [replace(group, rollouts=tuple(replace(r, model_s=5.0, tool_s=0.0) for r in group.rollouts)) for group in groups]
    played = history(calls, num_steps=3)
    played = replace(played, steps=tuple(replace(step, refit_s=1.0) for step in played.steps))
    if is_partial:
        config = Config.model_validate(played.config.model_dump() | {"train": {"batch_size": 2, "partial_rollout_enable": True}})
        played = replace(played, config=config)
    found = predict(played, max_lag=1)
    assert (found.num_steps, found.elapsed_s, found.wait_s) == (3, 17.0, wait_s)


def test_places_bound_what_runs_at_once():
    # two places: of four groups of 5 s the second pair starts at 5, so the first step (5-7) and the second (10-12)
    found = predict(history([past(i, duration=5.0) for i in range(4)], num_steps=2, num_places=2), max_lag=1)
    assert (found.num_steps, found.elapsed_s) == (2, 12.0)


def test_model_time_is_what_is_usual_and_the_rest_is_tools():
    # seven rollouts of 1 s and one of 9 s under one version: up to 1.5 s is model time, so 7.5 s of the long one are tools
    spans = {f"g{i}": {f"g{i}/0/0": (0.0, 9.0 if i == 7 else 1.0)} for i in range(8)}
    found = _model_times({name: (0.0, 0) for name in spans}, spans, Counter({f"g{i}/0/0": 10 for i in range(8)}))
    assert (found["g0/0/0"], found["g7/0/0"]) == (1.0, pytest.approx(1.5))


def test_slow_prompts_are_lost_under_a_tight_bound():
    # one prompt in five takes five steps; running two ahead with a bound of two loses some of them, and they are the long ones
    groups = [past(i, duration=50.0 if i % 5 == 0 else 4.0, n_sampled=500 if i % 5 == 0 else 40) for i in range(200)]
    found = predict(history(groups, num_steps=50, step_s=10.0), max_lag=2)
    assert found.n_stale > 0 and found.kept_share < 1
    assert found.length_lost == 500.0 and found.length_kept < 500
    assert found.length_p < 1e-3
    loose = predict(history(groups, num_steps=50, step_s=10.0), max_lag=8)
    assert loose.kept_share == 1.0 and loose.length_p is None


def test_the_bound_keeps_its_word():
    groups = [past(i, duration=float(3 + 7 * (i % 3))) for i in range(60)]
    for max_lag in range(4):
        found = predict(history(groups, num_steps=20, step_s=3.0), max_lag=max_lag)
        assert found.lag_max is None or found.lag_max <= max_lag


def test_every_token_has_one_fate():
    groups = [past(i, duration=float(3 + 7 * (i % 3)), n_sampled=5 + i) for i in range(60)]
    for max_lag in range(4):
        played = history(groups, num_steps=20, step_s=3.0)
        _, tokens = count_fates(played, play_paced(played, max_lag=max_lag, queue=3, filter_range=None))
        assert sum(tokens.values()) == sum(group.n_sampled for group in groups)


def test_recorded_pacing_drops_what_was_older_than_the_bound():
    # steps planned at 10, 20, 30 with versions 0, 1, 2; the group of step 2 was sampled under version 0: lag 2
    groups = [
        past(0, duration=5.0), past(1, duration=5.0),
        past(2, sent=5.0, duration=10.0, version=1), past(3, sent=5.0, duration=10.0, version=0),
        past(4, sent=6.0, duration=20.0, version=0), past(5, sent=15.0, duration=10.0, version=2),
        past(6, sent=16.0, duration=24.0, version=2),
    ]  # fmt: skip
    played = history(groups, num_steps=3)
    loose = play_recorded(played, max_lag=2, filter_range=None)
    assert (loose.num_steps, loose.wait_s) == (3, 0.0)
    tight = play_recorded(played, max_lag=1, filter_range=None)
    # group 4 is dropped; the last step waits for group 6 at 40: from 30, when it was planned
    assert tight.fate["e0-p4"].value == "stale"
    assert (tight.num_steps, tight.wait_s) == (3, 10.0)


def test_a_filter_drops_groups_by_their_mean_outcome():
    groups = [past(i, duration=1.0, reward=float(i % 2)) for i in range(8)]
    found = predict(history(groups, num_steps=4), max_lag=1, filter_range=(-0.5, 0.5))
    assert found.n_filtered == found.n_kept > 0
    assert (found.reward_kept, found.reward_lost, found.reward_p) == (0.0, 1.0, 0.0)


def test_an_unknown_pacing_and_a_negative_bound_are_refused():
    played = history([past(0, duration=1.0)], num_steps=1)
    with pytest.raises(SettingError, match="pacing=x is unknown"):
        predict(played, max_lag=0, pacing="x")
    with pytest.raises(SettingError, match="cannot be negative"):
        predict(played, max_lag=-1)


def test_a_made_log_is_read_and_played(tmp_path: Path):
    config = Config.model_validate({"rollout": {"batch_size": 4, "n_samples_per_prompt": 4}, "train": {"batch_size": 16}})
    where = make_run(tmp_path / "run", config, num_steps=8, max_lag=2)
    found = read_history(where)
    assert (len(found.groups), len(found.steps), found.num_open) == (32, 8, 0)
    assert [step.duration_s for step in found.steps] == [1.0] * 8
    own, on_policy = simulate_run(where, max_lags=(2, 0), pacing="recorded")
    assert own.kept_share == 1.0
    # a stricter bound loses tokens, and none without a fate
    assert on_policy.n_stale > 0 and on_policy.kept_share < 1
    assert on_policy.n_kept + on_policy.n_stale + on_policy.n_open == own.n_kept + own.n_open


def test_like_samples_pass_and_unlike_ones_fail():
    generator = np.random.default_rng(0)
    a, b, c = generator.normal(size=200), generator.normal(size=300), generator.normal(0.6, 1, size=300)
    assert ks_p_value(a, b) > 0.05 and welch_p_value(a, b) > 0.05
    assert ks_p_value(a, c) < 1e-4 and welch_p_value(a, c) < 1e-4


def test_ks_by_hand():
    # D = 1 with 4 and 4: z = (sqrt 2 + 0.12 + 0.11 / sqrt 2) = 1.612; p = 2 (e^(-2 z^2) - e^(-8 z^2)) = 0.01107
    assert ks_p_value([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(0.01107, abs=1e-5)


def test_too_few_samples_have_no_p_value():
    assert distribution_bias([1.0], [2.0, 3.0]).p_value is None
    assert mean_bias([], []).mean_kept is None


def test_predictions_are_json(tmp_path: Path, capsys):
    from cyclopts import App

    from molt.cli import ablate_verbs

    where = make_run(tmp_path / "run", Config(), num_steps=3)
    app = App()
    ablate_verbs.mount(app)
    app(["simulate", str(where), "--max-lag", "0", "1", "--json"], result_action="return_value")
    found = json.loads(capsys.readouterr().out)
    assert [item["max_lag"] for item in found] == [0, 1]
    app(
        ["ablate", str(where), "--estimators", "grpo", "rloo", "--corrections", "off", "token/mask", "--json"], result_action="return_value"
    )
    report = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in report["rows"]][:2] == ["grpo+off+token-mean", "grpo+token/mask+token-mean"]
    own = tmp_path / "own.py"
    own.write_text(
        "from molt.algo.advantage import estimator\n@estimator('test_own')\ndef own(inputs):\n    return inputs.spread(inputs.reward_U)\n"
    )
    app(["ablate", str(where), "--estimators", "test_own", "--agent", str(own), "--json"], result_action="return_value")
    assert json.loads(capsys.readouterr().out)["rows"][0]["estimator"] == "test_own"
    app(["ablate", str(where), "--recompute"], result_action="return_value")
    assert "of 3 steps equal" in capsys.readouterr().out


def test_simulating_imports_no_torch():
    code = "import sys, molt.simulate.run, molt.ablate.variants; sys.exit(int(any(n in sys.modules for n in ('torch', 'ray', 'vllm'))))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
