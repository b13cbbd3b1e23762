"""Starting the command line: it is light, its help lists the verbs, its errors are boxes with an exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from molt.cli.app import run
from molt.cli.audit_verbs import told_apart
from molt.cli.programs import run_program
from molt.errors import SettingError

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


def test_module_runs_as_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "molt.cli", "runs", str(tmp_path), "--json"], capture_output=True, text=True, timeout=60, check=True
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "r", "--steps", "0"], 'Invalid value "0" for --steps. Must be >= 1.'),
        (["ablate", "r", "--num-resamples", "-1"], "for --num-resamples. Must be >= 0."),
        (["ablate", "r", "--bands", "0.5:2"], "bands=0.5:2, no gate is tried that takes one"),
        (["ablate", "r", "--plot", "/no/such/folder/x.svg"], "plot=/no/such/folder/x.svg, its folder is not there"),
        (["simulate", "r", "--filter-range", "1", "0"], "filter_range=1 0, nothing lies inside"),
        (["sql", "r", "select 1", "--limit", "-5"], "for --limit. Must be >= 1."),
        (["plan", "--gpus", "8", "--gpu-memory-gib", "0"], "for --gpu-memory-gib. Must be > 0."),
        (["parity", "--agreement", "2"], "for --agreement. Must be <= 1."),
        (["runs", "no-such-folder"], "folder=no-such-folder, no such folder"),
    ],
)
def test_flag_beyond_its_bounds_is_told_before_anything_is_read(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert run([*words, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]


def test_columns_of_one_name_are_told_apart_in_json() -> None:
    assert told_apart(["lsn", "step", "lsn", "lsn", "lsn_2"]) == ["lsn", "step", "lsn_2", "lsn_3", "lsn_2_2"]


def test_pipeline_that_a_verb_cannot_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(SettingError, match=r"pipeline=.*empty.py, it has no function main"):
        run_program(str(tmp_path / "empty.py"))
    (tmp_path / "other.py").write_text("def main(config):\n    return 0\n")
    with pytest.raises(SettingError, match=r"pipeline=.*other.py, this verb does not run it: its main takes other arguments"):
        run_program(str(tmp_path / "other.py"), 1, at=2)
