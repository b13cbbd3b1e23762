"""Reading the scored steps of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from molt.ablate.recompute import compare_run
from molt.ablate.record import ScoredRun
from molt.config import Config
from molt.errors import DataError
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Score, event
from molt.log.writer import LogWriter
from tools.bench.made_run import make_run


def test_steps_come_in_order_with_all_their_columns(made):
    run = ScoredRun.open(made)
    steps = list(run.steps())
    assert [step.step for step in steps] == run.steps_scored == [0, 1, 2, 3, 4, 5]
    for step in steps:
        n = step.plan.n_sampled
        assert len(step.trainer_logprobs_T) == len(step.behaviour_logprobs_T) == len(step.version_T) == n
        assert all(column is not None and len(column) == n for column in step.columns.values())
        assert step.batch.num_segments == 16
        assert int(step.version_T.min()) >= 0


def test_only_the_steps_wanted_are_read(made):
    assert [step.step for step in ScoredRun.open(made).steps({2, 4, 99})] == [2, 4]


def test_an_earlier_place_in_the_log_has_fewer_steps(made):
    plans = LogReader.open(made).cut().table("events", ["lsn", "kind"], where="kind = 'step_trained'")
    third = plans["lsn"][2].as_py()
    assert ScoredRun.open(made, at=third).steps_scored == [0, 1, 2]


def test_a_step_trained_again_counts_as_trained_last(tmp_path):
    where = make_run(tmp_path / "run", Config(), num_steps=3)
    step = next(ScoredRun.open(where).steps({1}))
    writer = LogWriter.open(where, run="run", attempt=2, store="process")
    producer = Producer(writer, "again", is_validating=False)
    started = event(
        "attempt_started", config=Config().model_dump_json(), config_digest="", code_digest="", packages="{}", hardware="{}", seed=0,
        model_digest="", num_steps=3, pid=0, host="", resumed_from_step=1,
    )  # fmt: skip
    again = [
        Score(
            step=1, policy_version=1, segment_id=row.segment_id, rank=0, trainer_logprobs=np.full(row.n_sampled, -0.25, np.float32),
            advantages=np.zeros(row.n_sampled, np.float32), gate_weights=np.ones(row.n_sampled, np.float32),
        )
        for row in step.plan.segments
    ]  # fmt: skip
    producer.append_sync(events=[started], scores=again)
    writer.close()
    run = ScoredRun.open(where)
    # the second attempt trained step 1 again and never came to step 2, whose old scores are void
    assert run.steps_scored == [0, 1]
    found = {step.step: step for step in run.steps()}
    assert found[1].trainer_logprobs_T.unique().tolist() == [-0.25]
    assert found[0].trainer_logprobs_T.unique().tolist() != [-0.25]


def test_a_step_with_a_missing_score_is_skipped_and_named(tmp_path):
    where = make_run(tmp_path / "run", Config(), num_steps=2)
    run = ScoredRun.open(where)
    run._rows[1].popitem()
    assert [step.step for step in run.steps()] == [0]
    assert run.skipped[0].step == 1 and "1 of 16 segments have no score" in run.skipped[0].reason


def test_a_log_without_an_attempt_is_refused(tmp_path):
    LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process").close()
    with pytest.raises(DataError, match="attempt_started"):
        ScoredRun.open(tmp_path / "run")


def test_recomputing_finds_what_was_made(made):
    torch.set_num_threads(1)
    found = compare_run(ScoredRun.open(made))
    assert [(step.n_advantages_differ, step.n_weights_differ) for step in found] == [(0, 0)] * 6
