"""The connection that people ask on: locked, reading only, limited in time; typed views of every event kind."""

from __future__ import annotations

import duckdb
import pytest

from molt.audit.ask import ask_on
from molt.audit.questions import ask_question, load_questions
from molt.audit.report import audit_connection
from molt.audit.views import add_views, lock
from molt.errors import SettingError
from molt.schema import event_kinds, tables


@pytest.fixture
def locked():
    with duckdb.connect() as connection:
        for schema in tables().values():
            connection.execute(schema.ddl)
        add_views(connection)
        lock(connection)
        yield connection


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_text('/etc/hostname')",
        "select * from '/etc/hostname'",
        "select * from glob('/*')",
        "from read_csv('/etc/passwd')",
    ],
)
def test_files_are_out_of_reach(locked, text) -> None:
    with pytest.raises(SettingError, match="sql: "):
        ask_on(locked, text)


@pytest.mark.parametrize(
    "text",
    [
        "copy segments to '/tmp/stolen.csv'",
        "attach '/tmp/other.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "reset lock_configuration",
        "drop view tokens",
        "create table mine (a integer)",
        "delete from segments",
        "pragma enable_profiling",
        "export database '/tmp/stolen'",
        "select 1; drop view tokens",
        "",
    ],
)
def test_anything_but_one_reading_statement_is_refused(locked, text) -> None:
    with pytest.raises(SettingError, match="sql"):
        ask_on(locked, text)
    assert ask_on(locked, "select count(*) from tokens").rows == [(0,)]


def test_lock_holds_below_the_statement_check(locked) -> None:
    for text in ("set enable_external_access = true", "copy segments to '/tmp/stolen.csv'", "attach '/tmp/other.db'", "load httpfs"):
        with pytest.raises(duckdb.Error):
            locked.execute(text)


def test_variables_of_the_process_are_not_visible(locked) -> None:
    secret = duckdb.sql("select 1 as secret").to_arrow_table()
    assert secret.num_rows == 1
    with pytest.raises(SettingError, match="secret"):
        ask_on(locked, "select * from secret")


def test_question_that_takes_too_long_is_stopped(locked) -> None:
    with pytest.raises(SettingError, match=r"sql took more than 0\.2 s"):
        ask_on(locked, "select count(*) from range(10000000) a, range(1000000) b where a.range * b.range % 7 = 1", time_limit_s=0.2)


def test_question_of_the_folder_is_asked_by_name(locked) -> None:
    assert ask_on(locked, "ledger").rows == [("generated", "", 0, 0), ("trained", "", 0, 0)]


def test_rows_beyond_the_limit_are_cut_and_said(locked) -> None:
    answer = ask_on(locked, "select * from range(5)", limit=3)
    assert (len(answer.rows), answer.is_cut) == (3, True)


def test_long_lists_are_few_rows(locked, monkeypatch) -> None:
    # Rows come eight at a time: after the first eight there are 8 * 1,000 values, more than allowed; with 8,000 allowed 16 rows.
    for most, num_rows in ((7_999, 8), (8_000, 16), (1 << 20, 20)):
        monkeypatch.setattr("molt.audit.questions.MOST_VALUES", most)
        answer = ask_on(locked, "select range(1000) as x from range(20)")
        assert (len(answer.rows), answer.is_cut) == (num_rows, num_rows < 20)


@pytest.mark.parametrize("kind", sorted(event_kinds()))
def test_every_kind_has_a_view_with_its_declared_types(locked, kind) -> None:
    described = {row[0]: row[1] for row in locked.execute(f"describe {kind}").fetchall()}
    for column in event_kinds()[kind].columns:
        assert described[column.name] == column.sql_type


def test_kind_view_reads_bodies_lists_and_nulls(log) -> None:
    log.event(
        "group_dispatched",
        group_id="e0-p7",
        epoch=0,
        order_index=3,
        prompt_index=7,
        prompt_id="p",
        group_size=2,
        members=[0, 1],
        purpose="train",
    )
    log.event("step_trained", step=4, policy_version=2, loss=float("nan"), reward_mean=None)
    assert log.sql("select group_id, members, prompt_index from group_dispatched") == [("e0-p7", [0, 1], 7)]
    assert log.sql("select step, policy_version, loss, reward_mean from step_trained") == [(4, 2, None, None)]


def test_tokens_carry_their_spans(log) -> None:
    log.segment("e0-p0/0/0", versions=(0, 1))
    assert log.sql("select position, token_id, source, policy_version, is_trainable from tokens order by position") == [
        (0, 0, "user", None, False),
        (1, 1, "user", None, False),
        (2, 2, "policy", 0, True),
        (3, 3, "policy", 0, True),
        (4, 4, "policy", 1, True),
        (5, 5, "policy", 1, True),
    ]
    assert log.sql("select turn, n_tokens, n_sampled, version_min, version_max from turns") == [(0, 6, 4, 0, 1)]


def test_rollouts_and_groups_add_up_their_segments(log) -> None:
    log.start()
    log.dispatch(group_size=2)
    log.segment("e0-p0/0/0", num_segments=2, reward=1.0)
    log.segment("e0-p0/0/0", num_segments=2, segment_index=1, reward=1.0)
    log.segment("e0-p0/1/0", reward=0.0)
    assert log.sql("select rollout_id, num_segments, n_sampled, reward from rollouts order by 1") == [
        ("e0-p0/0/0", 2, 4, 1.0),
        ("e0-p0/1/0", 1, 2, 0.0),
    ]
    # Two rollouts, rewards 1 and 0: mean 0.5, however many segments each has.
    assert log.sql("select num_finished, n_sampled, reward_mean, decision from groups") == [(2, 6, 0.5, None)]


def test_token_is_explained_to_its_step(log) -> None:
    log.well()
    (row,) = ask_question(log.connection, load_questions()["explain_token"], segment_id="e0-p1/0/0/0", position=3).rows
    assert row[:6] == ("e0-p1/0/0/0", 3, 3, "policy", True, 0)
    assert row[10] == 1
    with pytest.raises(SettingError, match="has no parameter place"):
        ask_question(log.connection, load_questions()["explain_token"], place=3)


def test_report_is_well_only_when_every_invariant_is_empty(log) -> None:
    log.well()
    assert audit_connection(log.connection).is_well
    log.decide("e0-p0", "stale")
    report = audit_connection(log.connection)
    assert not report.is_well
    assert [entry["name"] for entry in report.as_dict()["invariants"] if not entry["is_well"]] == ["tokens_close"]


def test_one_word_that_is_no_question_is_told_with_the_nearest(locked) -> None:
    with pytest.raises(SettingError, match=r"sql=ledgr, it is no file in queries/, and one word is no SQL; did you mean ledger\?"):
        ask_on(locked, "ledgr")
