"""RUN, RUN@LSN and RUN@PIN, and content that was taken out of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from molt.ablate.record import ScoredRun
from molt.cli.ablate_verbs import split_place
from molt.config import Config
from molt.errors import LogError
from molt.log.core import open_core
from molt.log.pin import create_pin
from molt.log.retention import Family, drop_family
from molt.log.store import load_store
from tools.bench.made_run import make_run


def test_a_place_is_what_follows_the_at_sign(tmp_path: Path) -> None:
    assert split_place("runs/x") == ("runs/x", None)
    assert split_place("runs/x@12") == ("runs/x", 12)
    assert split_place("runs/x@golden") == ("runs/x", "golden")
    (tmp_path / "a@b").mkdir()
    assert split_place(str(tmp_path / "a@b")) == (str(tmp_path / "a@b"), None)


def test_a_pin_is_read_as_it_was_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    where = make_run(tmp_path / "run", Config(), num_steps=2)
    create_pin(where, "golden")
    assert ScoredRun.open(where, at="golden").steps_scored == [0, 1]
    with pytest.raises(LogError, match="no such pin"):
        ScoredRun.open(where, at="silver")


def test_a_step_whose_scores_were_taken_out_is_skipped_and_named(tmp_path: Path) -> None:
    where = make_run(tmp_path / "run", Config(), num_steps=3)
    scores = ScoredRun.open(where).cut.table("scores", ["lsn", "step"]).to_pylist()
    last = max(row["lsn"] for row in scores if row["step"] == 0)
    core = open_core(where, load_store("process"), run="run", attempt=1)
    try:
        drop_family(core, Family.SCORES, before_lsn=last + 1, reason="test")
    finally:
        core.close()
    run = ScoredRun.open(where)
    assert [step.step for step in run.steps()] == [1, 2]
    assert "taken out of the log" in run.skipped[0].reason
