"""Measures of an ablation against a slow oracle over the same log, and the laws of their intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from molt.ablate.measure import Tally, teacher_of
from molt.ablate.plot import svg
from molt.ablate.record import ScoredRun
from molt.ablate.report import MEASURES, make_report
from molt.ablate.variants import baseline_of, parse_grid
from tests.algo import reference

ALL = ["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "gae", "on_policy_distill", "flash_reinforce"]


def ablate(run, estimators, gates, aggregations=("token-mean",), baseline=None, num_resamples=100, seed=0):
    grid = parse_grid(estimators, gates, [], aggregations)
    tally = Tally(grid=grid, config=run.config, baseline=baseline_of(grid, baseline), num_resamples=num_resamples, seed=seed)
    for step in run.steps():
        tally.add(step)
    return make_report(tally, run="made", lsn=run.cut.lsn, skipped={s.step: s.reason for s in run.skipped})


def value(report, variant, measure):
    return next(row for row in report.rows if row.variant == variant).measures[measure].value


def rollouts_of(step):
    """The oracle's rollouts of one batch (one segment each)."""
    return [{"group": row.group_id, "reward": row.reward, "segments": [row.n_sampled]} for row in step.plan.segments]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_baseline"])
def test_measures_agree_with_a_slow_oracle(made, name):
    run = ScoredRun.open(made)
    report = ablate(run, [name], ["token/mask/0.97:1.03"], ["seq-mean-token-mean"])
    signals, advantages, kept, lengths, means, moved, losses = [], [], [], [], [], [], []
    for step in run.steps():
        rollouts = rollouts_of(step)
        sizes = [r["segments"][0] for r in rollouts]
        a = reference.advantages(name, rollouts)
        w, k = reference.gate(step.trainer_logprobs_T.tolist(), step.behaviour_logprobs_T.tolist(), sizes, "token", "mask", 0.97, 1.03)
        scale = reference.scale("seq-mean-token-mean", rollouts)
        signals.append(a * w)
        advantages.append(a)
        kept.append(k)
        cuts = np.cumsum(sizes)[:-1]
        lengths += sizes
        means += [part.mean() for part in np.split(a * w, cuts)]
        moved += [part.sum() for part in np.split(scale * np.abs(a * w), cuts)]
        losses.append(-(scale * a * w).sum())
    s, a, k = np.concatenate(signals), np.concatenate(advantages), np.concatenate(kept)
    weights = np.concatenate([np.where(x, 1, 0) for x in kept])
    assert weights.sum() < len(weights), "the gate rejects something here"
    expected = {
        "effective_share": (np.abs(s) > 0).mean(),
        "rejected_share": 1 - k.mean(),
        "advantage_mean": a.mean(),
        "advantage_std": a.std(),
        "advantage_skew": ((a - a.mean()) ** 3).mean() / a.std() ** 3,
        "advantage_kurtosis": ((a - a.mean()) ** 4).mean() / a.std() ** 4 - 3,
        "signal_std": s.std(),
        "length_correlation": np.corrcoef(lengths, means)[0, 1],
        "moved_length_correlation": np.corrcoef(lengths, moved)[0, 1],
        "loss": np.mean(losses),
        "sign_agreement": 1.0,
    }
    for measure, wanted in expected.items():
        found = value(report, f"{name}+token/mask/0.97:1.03+seq-mean-token-mean", measure)
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), measure


def test_weights_of_one_have_the_full_sample(made):
    report = ablate(ScoredRun.open(made), ["grpo"], ["off", "token/trunc"])
    assert value(report, "grpo+off+token-mean", "sample_share") == 1.0
    assert value(report, "grpo+off+token-mean", "rejected_share") == 0.0
    assert 0.9 < value(report, "grpo+token/trunc+token-mean", "sample_share") < 1.0


def test_reinforce_and_a_group_baseline_disagree_on_some_signs(made):
    report = ablate(ScoredRun.open(made), ["grpo", "reinforce", "dr_grpo"], ["off"])
    assert value(report, "dr_grpo+off+token-mean", "sign_agreement") == 1.0
    assert value(report, "reinforce+off+token-mean", "sign_agreement") <= 1.0


def test_the_baseline_differs_from_itself_by_nothing(made):
    report = ablate(ScoredRun.open(made), ["grpo", "rloo"], ["off"], baseline="rloo+off+token-mean")
    row = next(row for row in report.rows if row.variant == report.baseline)
    for name in MEASURES:
        estimate = row.measures[name]
        assert (estimate.difference, estimate.difference_low, estimate.difference_high) == (0.0, 0.0, 0.0)


def test_pairing_makes_a_scaled_copy_certain(made):
    # rloo = n/(n-1) * centred: on complete groups of four its deviation is 4/3 of dr_grpo's in every resample
    report = ablate(ScoredRun.open(made), ["dr_grpo", "rloo"], ["off"])
    base = value(report, "dr_grpo+off+token-mean", "advantage_std")
    other = next(row for row in report.rows if row.estimator == "rloo").measures["advantage_std"]
    assert other.difference == pytest.approx(base / 3, rel=1e-5)
    assert other.difference_high - other.difference_low < 0.4 * (other.high - other.low)


def test_intervals_hold_the_value_and_repeat_with_the_seed(made):
    first = ablate(ScoredRun.open(made), ALL, ["off", "seq/mask"])
    again = ablate(ScoredRun.open(made), ALL, ["off", "seq/mask"])
    other = ablate(ScoredRun.open(made), ALL, ["off", "seq/mask"], seed=1)
    assert first == again
    assert first.rows[0].measures["loss"].low != other.rows[0].measures["loss"].low
    for row in first.rows:
        estimate = row.measures["effective_share"]
        assert estimate.low <= estimate.value <= estimate.high


def test_an_estimator_that_the_log_cannot_feed_is_named_and_left_out(bare):
    report = ablate(ScoredRun.open(bare), ["grpo", "gae", "on_policy_distill"], ["off"])
    assert [row.estimator for row in report.rows] == ["grpo"]
    assert "values" in report.unavailable["gae"] and "teacher_logprobs" in report.unavailable["on_policy_distill"]


def test_every_estimator_and_gate_has_finite_shares(made):
    report = ablate(ScoredRun.open(made), ALL, ["off", "token/mask", "seq/clip", "geo/trunc", "kl/token/mask", "decoupled/token/mask"])
    assert len(report.rows) == 48
    for row in report.rows:
        assert 0 <= row.measures["effective_share"].value <= 1
        assert math.isfinite(row.measures["signal_std"].value)


def test_the_plot_shows_every_variant(made):
    report = ablate(ScoredRun.open(made), ["grpo", "rloo"], ["off", "token/mask"])
    text = svg(report)
    assert text.count("<circle") == 4 * 6
    assert all(f">{row.variant}</text>" in text for row in report.rows)
    assert 'font-weight="bold">grpo+off+token-mean<' in text


def test_the_frozen_reference_serves_as_teacher_where_no_teacher_was_recorded(made):
    step = next(iter(ScoredRun.open(made).steps()))
    assert teacher_of(step) is step.columns["teacher_logprobs"]
    without = replace(step, columns={**step.columns, "teacher_logprobs": None})
    assert teacher_of(without) is step.columns["reference_logprobs"] is not None
