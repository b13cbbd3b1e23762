"""The environment: known names only, children inherit, secrets never leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from molt import environ, machine
from molt.runs import create_run
from molt.settings import resolve

CANARY = "canary-5f1c9a"


def test_unknown_variable_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="MOLT_NOTHING"):
        environ.read("MOLT_NOTHING")


def test_empty_is_absent(monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert environ.read("RAY_ADDRESS", "local") == "local"


@pytest.mark.parametrize(("value", "is_set"), [("1", True), ("yes", True), ("0", False), ("false", False), ("", False)])
def test_switch_reads_the_usual_words(monkeypatch, value, is_set) -> None:
    monkeypatch.setenv("MOLT_TRACEBACK", value)
    assert environ.is_set("MOLT_TRACEBACK") is is_set


def test_default_yields_to_what_the_user_set(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environ.set_default("OMP_NUM_THREADS", "1") == "3"
    assert environ.child(EXTRA="x")["OMP_NUM_THREADS"] == "3"


def test_secrets_reach_neither_the_record_nor_the_run_folder(monkeypatch, tmp_path: Path) -> None:
    for name in environ.VARIABLES:
        if any(word in name for word in ("KEY", "SECRET", "TOKEN")):
            monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("SOMEBODYS_PASSWORD", CANARY)
    run = create_run(resolve([], ["--run.dir", str(tmp_path)]))
    told = json.dumps([environ.recorded(), machine.packages(), machine.hardware()])
    assert CANARY not in told
    assert environ.recorded()["AWS_SECRET_ACCESS_KEY"] == "(set)"
    assert not any(CANARY in path.read_text() for path in run.path.rglob("*") if path.is_file())


def test_what_steers_numbers_is_recorded(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert machine.hardware()["environment"]["OMP_NUM_THREADS"] == "7"


def test_code_digest_depends_on_what_it_is_given(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("a = 1\n")
    first = machine.code_digest(agent)
    assert machine.code_digest(agent) == first
    agent.write_text("a = 2\n")
    assert machine.code_digest(agent) != first


def test_machine_findings_name_the_setting_and_the_way_out() -> None:
    config = resolve([], ["--fsdp.attn_implementation", "te", "--vllm.engine", "vllm", "--vllm.tensor_parallel_size", "64"])
    told = "\n".join(machine.machine_findings(config))
    if machine.version_of("transformer-engine") is None:
        assert "set fsdp.attn_implementation=sdpa" in told
    assert "vllm.tensor_parallel_size=64" in told or "vllm.engine=vllm needs vLLM" in told
