"""The folder of a run: names, attempts, nothing half-made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from molt.config import Config
from molt.errors import LogFullError, SettingError
from molt.runs import create_run, list_runs, open_run
from molt.settings import resolve


def config(folder: Path, name: str | None = None) -> Config:
    return resolve([], ["--run.dir", str(folder), *(["--run.name", name] if name else [])])


def test_run_holds_its_settings_and_opens_again(tmp_path: Path) -> None:
    run = create_run(config(tmp_path, "first"))
    assert open_run(run.path).config().run.name == "first"
    assert [found.name for found in list_runs(tmp_path)] == ["first"]


def test_used_name_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    create_run(config(tmp_path, "first"))
    with pytest.raises(SettingError, match=r"run\.name=first is used .* --resume"):
        create_run(config(tmp_path, "first"))


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "a b", "x\0y", "é"])
def test_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="is no name of a folder"):
        create_run(config(tmp_path, name))
    assert list(tmp_path.iterdir()) == []


def test_made_name_says_agent_and_model(tmp_path: Path) -> None:
    flags = ["--run.dir", str(tmp_path), "--train.agent_path", "my agent.py", "--actor.model_name_or_path", "models/Qwen3"]
    run = create_run(resolve([], flags))
    assert run.name.startswith("my-agent--Qwen3--")
    assert run.config().run.name == run.name


def test_attempts_count_up_and_are_never_shared(tmp_path: Path) -> None:
    run = create_run(config(tmp_path, "r"))
    assert [run.begin_attempt(), run.begin_attempt()] == [1, 2]
    assert run.attempt_logs(2).is_dir()


def test_folder_of_an_unstarted_run_is_taken_away(tmp_path: Path) -> None:
    run = create_run(config(tmp_path, "r"))
    run.discard_unstarted()
    assert create_run(config(tmp_path, "r")).path == run.path
    run.log.mkdir()
    run.discard_unstarted()
    assert run.path.is_dir()


def test_disk_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LogFullError, match=r"run\.dir=.*choose another"):
        create_run(config(tmp_path / "file", "r"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no such folder"):
        open_run(tmp_path / "none")
    with pytest.raises(SettingError, match=r"neither config\.resolved\.toml nor log/"):
        open_run(tmp_path)


def test_write_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit of 10 bytes a file stands for the full disk: the settings are longer."""
    code = """
import resource, signal, sys
from molt.errors import LogFullError
from molt.runs import create_run
from molt.settings import resolve

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
config = resolve([], ["--run.dir", sys.argv[1], "--run.name", "r"])
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    create_run(config)
except LogFullError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert "run.dir=" in done.stdout
    assert list(tmp_path.iterdir()) == []
