"""The mismatch questions against numpy over the same log."""

from __future__ import annotations

import numpy as np
import pytest

from molt.ablate.record import ScoredRun
from molt.audit.ask import ask


def rows(made, question):
    answer = ask(made, question)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def tokens(made):
    """(step, version, log-ratio, equal, effective) of every sampled token."""
    parts = []
    for step in ScoredRun.open(made).steps():
        r = step.trainer_logprobs_T.double().numpy() - step.behaviour_logprobs_T.double().numpy()
        live = ((step.columns["gate_weights"] > 0) & (step.columns["advantages"] != 0)).numpy()
        parts.append((np.full(len(r), step.step), step.version_T.numpy(), r, r == 0, live))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def test_mismatch_of_each_step(made):
    step_N, _, r_N, equal_N, live_N = tokens(made)
    for row in rows(made, "mismatch_by_step"):
        here = step_N == row["step"]
        r = r_N[here]
        assert row["n_tokens"] == here.sum()
        assert row["vllm_kl"] == pytest.approx(-r.mean(), abs=1e-12)
        assert row["k3"] == pytest.approx((np.exp(r) - 1 - r).mean(), rel=1e-9)
        assert row["abs_max"] == pytest.approx(np.abs(r).max())
        assert row["ratio_p99"] == pytest.approx(np.quantile(np.exp(r), 0.99))
        assert row["bitwise_equal_share"] == pytest.approx(equal_N[here].mean())
        assert row["effective_token_share"] == pytest.approx(live_N[here].mean())


def test_mismatch_of_each_version_grows_with_its_lag(made):
    step_N, version_N, r_N, _, _ = tokens(made)
    found = rows(made, "mismatch_by_version")
    for row in found:
        here = (version_N == row["policy_version"]) & (step_N - version_N == row["lag"])
        assert row["n_tokens"] == here.sum()
        assert row["k3"] == pytest.approx((np.exp(r_N[here]) - 1 - r_N[here]).mean(), rel=1e-9)
    by_lag = {lag: np.average([r["k3"] for r in found if r["lag"] == lag]) for lag in (0, 1)}
    assert by_lag[1] > by_lag[0]  # the made run drifts with staleness
