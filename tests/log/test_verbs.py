"""The verbs that look after a log, as a user types them: exit codes, JSON, and words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molt.cli.app import run
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.store import Store
from molt.log.writer import LogWriter
from tests.log.build import make_fact, make_segment


@pytest.fixture
def filled(run_dir: Path, fast: Callable[..., Store]) -> str:
    """Three segments and three events."""
    with LogWriter.open(run_dir, run="run", store=fast("process")) as writer:
        producer = Producer(writer, "p")
        for index in range(3):
            producer.append_sync(segments=[make_segment(index)], events=[make_fact(index)])
    (run_dir / "config.resolved.toml").write_text("")
    return str(run_dir)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = run([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_verify_says_clean_and_gives_the_root(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = said(capsys, "verify", filled)
    assert (code, report["is_clean"], report["lsn_end"]) == (0, True, 5)
    assert len(report["root"]) == 32


def test_damage_leaves_with_one_until_it_is_repaired(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((Path(filled) / "log" / "events.lance" / "data").glob("*.lance"))
    path.write_bytes(path.read_bytes()[:40])
    assert said(capsys, "verify", filled)[0] == 1
    assert said(capsys, "fsck", filled)[0] == 1
    code, repair = said(capsys, "fsck", filled, "--repair")
    assert (code, len(repair["lost"]), len(repair["quarantined"])) == (0, 1, 1)
    assert said(capsys, "verify", filled)[0] == 0


def test_seal_pin_redact_drop_and_compact(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "seal", filled)[1]["lsn_end"] == 5
    assert said(capsys, "pin", "create", filled, "one")[1]["lsn"] == 5
    assert [pin["name"] for pin in said(capsys, "pin", "list", filled)[1]] == ["one"]
    assert said(capsys, "pin", "verify", filled, "one") == (0, {"pin": "one", "is_true": True, "wrong": []})
    emptied = said(capsys, "redact", filled, "e0-p1/0/0", "--reason", "asked")[1]
    assert emptied[0]["kept_by"] == ["pins/one.json"]
    assert said(capsys, "drop", filled, "scores", "--before-lsn", "3")[1]["num_rows"] == 0
    assert {item["table"] for item in said(capsys, "compact", filled)[1]} >= {"segments", "events"}
    assert LogReader.open(filled).cut("one").table("segments", ["n_tokens"]).num_rows == 3
    assert said(capsys, "pin", "delete", filled, "one")[0] == 0


def test_export_and_import(filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = said(capsys, "export", filled, str(tmp_path / "out"))[1]
    copied = said(capsys, "import", str(tmp_path / "out"), str(tmp_path / "copy"), "--store", "process")[1]
    assert made["root"] == copied["root"]


def test_wrong_calls_are_told_in_words(filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = said(capsys, "pin", "verify", filled, "none")
    assert code == 1
    assert "no such pin" in error["error"]
    code, error = said(capsys, "import", str(tmp_path), str(tmp_path / "copy"))
    assert code == 2
    assert "MANIFEST.json" in error["error"]
    code, error = said(capsys, "drop", filled, "tokens", "--before-lsn", "3")
    assert code == 2
    assert "give at most 0" in error["error"]


def test_verb_that_writes_is_refused_while_a_writer_holds_the_run(
    filled: str, fast: Callable[..., Store], capsys: pytest.CaptureFixture[str]
) -> None:
    with LogWriter.open(filled, run="run", store=fast("process")):
        code, error = said(capsys, "seal", filled)
        assert code == 1
        assert error["type"] == "LeaseHeldError"
        assert said(capsys, "verify", filled)[0] == 0
