"""Starting the command line: it is light, its help lists the verbs, its errors are boxes with an exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "transformers")

IMPORTS = {
    "molt --help": "from molt.cli.app import run; run(['--help'])",
    "molt train --help": "from molt.cli.app import run; run(['train', '--help'])",
    "molt.log": "import molt.log, molt.log.reader, molt.log.writer, molt.log.rows",
    "molt.audit": "import molt.audit, molt.audit.views, molt.audit.report, molt.audit.ask",
    "molt.view": "import molt.view, molt.view.panel",
    "molt.config": "import molt.config, molt.settings, molt.runs, molt.machine",
    "molt.admission": "import molt.admission, molt.admission.plan",
    "molt.data": "import molt.data, molt.data.prompts",
}


@pytest.mark.parametrize("what", IMPORTS)
def test_light_half_takes_in_nothing_heavy(what: str) -> None:
    code = f"{IMPORTS[what]}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_help_names_every_verb(molt) -> None:
    said = molt("--help")
    assert said.code == 0
    for verb in ("train", "status", "sql", "audit", "replay", "runs", "doctor", "settings"):
        assert f" {verb} " in said.out


def test_mistyped_verb_is_a_box_with_the_nearest(molt) -> None:
    said = molt("trian")
    assert said.code == 2
    assert 'Did you mean "train"' in said.err.replace("\n", " ")
    assert "Traceback" not in said.err


def test_error_with_json_is_one_document(molt) -> None:
    said = molt("train", "--json", "--actor.nothing", "x")
    assert said.code == 2
    assert json.loads(said.out)["type"] == "SettingError"


def test_version_is_told(molt) -> None:
    from molt import __version__

    assert molt("--version").out.strip() == __version__


def test_module_runs_as_the_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "molt.cli", "runs", "/nonexistent", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []


def test_doctor_reports_tiers(molt) -> None:
    said = molt("doctor", "--json")
    report = json.loads(said.out)
    assert report["tiers"]["reader"]["complete"] is True
    assert report["hardware"]["cores"] >= 1
    assert said.code == (1 if report["wrong_packages"] else 0)


def test_settings_lists_every_setting(molt) -> None:
    listed = {entry["key"]: entry for entry in json.loads(molt("settings", "--json").out)}
    assert listed["train.async_queue_size"]["value"] == 1
    assert listed["rollout.timeout_s"]["meaning"].startswith("Longest rollout in seconds")
