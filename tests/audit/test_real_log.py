"""Audit, sql and status over a real Lance log, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from molt.admission.recover import SEGMENT_COLUMNS
from molt.audit.report import audit_run
from molt.audit.views import open_audit
from molt.cli.app import run as molt
from molt.config import Config
from molt.errors import LogError
from molt.log.pin import create_pin
from molt.log.producer import Producer
from molt.log.rows import Consumption, Score, Segment, Span, TokenSource, event
from molt.log.writer import LogWriter
from molt.runs import create_run
from molt.settings import resolve

HOSTILE = "\x1b[2J\u202e"


def segment(index: int) -> Segment:
    """A segment of group e0-p<index>: two user tokens and two sampled ones."""
    return Segment(
        rollout_id=f"e0-p{index}/0/0",
        group_id=f"e0-p{index}",
        segment_index=0,
        num_segments=1,
        member=0,
        group_size=1,
        prompt_id="p",
        prompt_index=index,
        epoch=0,
        token_ids=np.arange(4, dtype=np.int32),
        behaviour_logprobs=np.array([np.nan, np.nan, -0.5, -0.5], np.float32),
        spans=[
            Span(len=2, source=TokenSource.USER),
            Span(len=2, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0),
        ],
        reward=1.0,
        is_terminated=True,
        is_truncated=False,
        stop_reason="terminated",
        temperature=1.0,
        engine="embedded-0",
        tokenizer_digest="t",
        template_digest="t",
        started_at=0.0,
        finished_at=1.0,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one trained step and one open group, with text in an error that would clear a terminal."""
    run = create_run(resolve([], ["--run.dir", str(tmp_path_factory.mktemp("runs")), "--run.name", "r"]))
    with_settings = {"config": Config().model_dump_json(), "config_digest": "c", "code_digest": "d", "packages": "{}", "hardware": "{}"}
    figures = {"step": 0, "policy_version": 0, "n_sampled": 2, "num_rollouts": 1, "seed": 0, "cursor": 4}
    row = {name: getattr(segment(0), name) for name in SEGMENT_COLUMNS if name != "lsn"} | {"lsn": 2}
    plan = {"segments": [row], "micro_batches": [[[0]]], "num_groups": 1, **figures}
    writer = LogWriter.open(run.path, run="r", attempt=1, store="process")
    producer = Producer(writer, "test")
    producer.append_sync(events=[event("attempt_started", **with_settings, seed=0, model_digest="m", num_steps=1, pid=1, host="h")])
    for index in range(2):
        dispatched = {
            "epoch": 0,
            "order_index": index,
            "prompt_index": index,
            "prompt_id": "p",
            "group_size": 1,
            "members": [0],
            "purpose": "train",
        }
        producer.append_sync(events=[event("group_dispatched", group_id=f"e0-p{index}", **dispatched)])
        producer.append_sync(segments=[segment(index)])
    failed = {
        "group_id": "e0-p1",
        "member": 0,
        "reason": "agent_error",
        "error": HOSTILE,
        "n_sampled": 3,
        "num_tries": 1,
        "is_final": False,
    }
    producer.append_sync(events=[event("rollout_failed", rollout_id="e0-p1/0/9", **failed)])
    admitted = {"decision": "admitted", "reason": "lag 0", "lag": 0, "num_rollouts": 1, "num_failed": 0, "n_sampled": 2}
    producer.append_sync(events=[event("group_decided", group_id="e0-p0", **admitted)])
    planned = {"plan": json.dumps(plan), "plan_digest": "d", "groups": ["e0-p0"], "num_segments": 1}
    producer.append_sync(events=[event("batch_planned", **planned, **figures)])
    ones = np.ones(2, np.float32)
    score = Score(
        step=0, policy_version=0, segment_id="e0-p0/0/0/0", rank=0, trainer_logprobs=-0.5 * ones, advantages=ones, gate_weights=ones
    )
    gate = event("gate_decided", step=0, segment_id="e0-p0/0/0/0", level="off", mode="mask", n_tokens=2, n_kept=2)
    producer.append_sync(scores=[score], events=[gate])
    figures = {"loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-3, "n_sampled": 2, "n_kept": 2, "reward_mean": 1.0, "metrics": "{}"}
    seconds = {"train_s": 1.0, "log_s": 0.1, "wait_s": 0.2}
    trained = event("step_trained", step=0, policy_version=0, **figures, **seconds, batch_digest="b", loss_digest="l")
    consumed = Consumption(
        step=0, segment_id="e0-p0/0/0/0", rollout_id="e0-p0/0/0", group_id="e0-p0", policy_version=0, rank=0, micro_batch=0, position=0,
        n_sampled=2, n_kept=2, lag=0, cursor=2,
    )  # fmt: skip
    producer.append_sync(events=[trained], consumption=[consumed])
    writer.close()
    return run.path


def test_audit_of_a_run_in_order_is_well(run_dir) -> None:
    report = audit_run(run_dir)
    assert [finding.question.name for finding in report.findings if not finding.is_well] == []
    # 2 segments of 2 sampled tokens, and 3 of a failed try: 7 = 2 trained + 3 failed + 2 open.
    assert [(line.fate, line.n_tokens) for line in report.ledger] == [("generated", 7), ("trained", 2), ("failed", 3), ("open", 2)]


def test_audit_verb_prints_the_ledger_and_leaves_with_0(run_dir, capsys) -> None:
    assert molt(["audit", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "the ledger closes: 7 generated, 7 accounted for" in out
    assert "gates_recomputed" in out


def test_audit_as_of_an_lsn_sees_less(run_dir, capsys) -> None:
    assert molt(["audit", f"{run_dir}@2", "--json"]) == 0
    ledger = {line["fate"]: line["n_tokens"] for line in json.loads(capsys.readouterr().out)["ledger"]}
    assert ledger == {"generated": 2, "trained": 0, "open": 2}


def test_audit_beyond_the_log_is_refused(run_dir, capsys) -> None:
    with pytest.raises(LogError, match="reaches only to"):
        audit_run(run_dir, at=10_000)
    assert molt(["audit", f"{run_dir}@newest"]) != 0
    assert "newest" in capsys.readouterr().err


def test_audit_at_a_pin_sees_what_was_pinned(run_dir, tmp_path, capsys) -> None:
    copy = tmp_path / "pinned"
    shutil.copytree(run_dir, copy)
    create_pin(copy, "early", at=2)
    assert molt(["audit", f"{copy}@early", "--json"]) == 0
    ledger = {line["fate"]: line["n_tokens"] for line in json.loads(capsys.readouterr().out)["ledger"]}
    assert ledger == {"generated": 2, "trained": 0, "open": 2}


def test_audit_verb_leaves_with_1_and_names_the_rows(run_dir, tmp_path, capsys) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(run_dir, copy)
    writer = LogWriter.open(copy, run="r", attempt=2, store="process")
    stale = {"decision": "stale", "reason": "x", "num_rollouts": 1, "num_failed": 0, "n_sampled": 2}
    Producer(writer, "later").append_sync(events=[event("group_decided", group_id="e0-p0", **stale)])
    writer.close()
    assert molt(["audit", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "2 fates: dropped stale, trained step" in out
    assert "the ledger does not close" in out


def test_sql_verb_answers_in_a_table_and_in_json(run_dir, capsys) -> None:
    assert molt(["sql", str(run_dir), "select rollout_id, reward from rollouts order by 1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [
        {"rollout_id": "e0-p0/0/0", "reward": 1.0},
        {"rollout_id": "e0-p1/0/0", "reward": 1.0},
    ]
    for limit, is_cut in (("1", True), ("2", False)):
        assert molt(["sql", str(run_dir), "from rollouts", "--limit", limit, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["is_cut"] is is_cut
    assert molt(["sql", str(run_dir), "failures"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2J\\u202e" in out
    assert "\x1b" not in out


def test_sql_verb_refuses_to_write(run_dir, capsys) -> None:
    assert molt(["sql", str(run_dir), "copy segments to '/tmp/x.csv'"]) == 2
    assert "only reading is possible" in capsys.readouterr().err


def test_lock_holds_on_a_real_log(run_dir) -> None:
    import duckdb

    with open_audit(run_dir) as connection:
        for text in ("select * from read_text('/etc/hostname')", "attach '/tmp/other.db'", "set enable_external_access = true"):
            with pytest.raises(duckdb.Error):
                connection.execute(text)
        assert connection.execute("select count(*) from tokens").fetchall() == [(8,)]


def test_status_verb_says_where_the_run_stands(run_dir, capsys) -> None:
    assert molt(["status", str(run_dir), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["attempts"], facts["steps"], facts["num_steps"], facts["reward_mean"]) == (1, 1, 1, 1.0)
    assert facts["state"] == "running, or lost without a word"
    assert facts["tokens open (not decided)"] == 2


def test_status_counts_a_group_sent_again_once_and_names_the_checkpoint_that_a_run_stands_on(tmp_path: Path, capsys) -> None:
    """Of checkpoints 2 and 4 the later was damaged: the run went on from 2, sent a group of two again and saved 3."""
    saved = [
        event("checkpoint_saved", step=step, policy_version=step, path=f"checkpoints/{step}", weights_digest="d", cursor=-1, lsn_end=0)
        for step in (2, 4, 3)
    ]
    place = {"epoch": 0, "order_index": 0, "prompt_index": 0, "prompt_id": "p", "group_size": 2, "purpose": "train"}
    sent = [event("group_dispatched", group_id="e0-p0", members=members, **place) for members in ([0, 1], [1])]
    (tmp_path / "log").mkdir()
    with LogWriter.open(tmp_path, run="r", attempt=1, store="process") as writer:
        Producer(writer, "test").append_sync(events=[*saved[:2], *sent, saved[2]])
    assert molt(["status", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["groups_dispatched"], facts["checkpoint_step"]) == (1, 3)


def test_runs_verb_lists_it(run_dir, capsys) -> None:
    assert molt(["runs", str(run_dir.parent), "--json"]) == 0
    assert [entry["run"] for entry in json.loads(capsys.readouterr().out)] == ["r"]
