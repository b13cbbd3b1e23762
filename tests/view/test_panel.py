"""The live view: lines, heartbeat, panel and figures, by hand-made clocks."""

from __future__ import annotations

import io
import re
import time

import pytest

from molt.config import Config
from molt.runs import create_run
from molt.settings import resolve
from molt.view.line import key_values, step_line
from molt.view.pace import Pace, duration
from molt.view.panel import Progress
from molt.view.tables import console


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


FIGURES = {
    "step": 1,
    "version": 1,
    "reward": 0.5,
    "loss": -0.25,
    "n_sampled": 200,
    "n_kept": 150,
    "lag": 1,
    "ready": 2,
    "running": 6,
    "refused": None,
}


def test_pace_of_two_steps() -> None:
    pace = Pace(num_steps=10, began=100.0)
    pace.add(104.0, {"step": 0, "n_kept": 100, "reward": 0.25})
    pace.add(106.0, {"step": 1, "n_kept": 200, "reward": 0.75})
    # 6 s for 2 steps: 3 s a step, 8 left: 24 s. 300 kept tokens in 6 s: 50 a second.
    assert (pace.seconds_per_step, pace.eta_s, pace.tokens_per_s, pace.reward) == (3.0, 24.0, 50.0, 0.5)


def test_time_to_start_up_is_no_step() -> None:
    pace = Pace(num_steps=3, began=0.0)
    pace.add(60.0, {"step": 0, "n_kept": 10, "train_s": 1.5, "wait_s": 0.5})
    # 2 s of the minute were the step.
    assert (pace.seconds_per_step, pace.eta_s) == (2.0, 4.0)


def test_pace_before_the_first_step_knows_nothing() -> None:
    pace = Pace(num_steps=10, began=0.0)
    assert (pace.seconds_per_step, pace.eta_s, pace.tokens_per_s, pace.reward) == (None, None, None, None)


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (3720, "1h02m")])
def test_duration(seconds, text) -> None:
    assert duration(seconds) == text


def test_step_is_one_line_of_key_values() -> None:
    pace = Pace(num_steps=4, began=0.0)
    pace.add(10.0, FIGURES)
    # 150 of 200 kept: a quarter rejected; 150 tokens in 10 s; step 1 done in one step of 10 s, two steps left.
    assert step_line(FIGURES, pace) == (
        "step=1 of=4 version=1 reward=0.5 loss=-0.25 lag=1 ready=2 running=6 rejected=0.25 tokens_per_s=15 eta=20s"
    )


def test_values_with_spaces_are_quoted_and_harmless() -> None:
    assert (
        key_values({"a": 'x "y"', "b": "\x1b[2J", "c": None, "d": "two\nlines", "e": ""}) == 'a="x \\"y\\"" b=\\x1b[2J d=two\\nlines e=""'
    )


def test_lines_go_out_where_there_is_no_terminal() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress(Config(), num_steps=4, file=file, clock=clock, heartbeat_s=1000) as progress:
        progress.waiting("waiting for rollouts: 1 of 2 groups ready")
        clock.now += 10
        progress.step(FIGURES)
        progress.note("checkpoint saved")
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("step=1 of=4 ")
    assert lines[1] == 'note="checkpoint saved"'


def test_heartbeat_names_what_is_waited_for() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress(Config(), file=file, clock=clock, heartbeat_s=0.01) as progress:
        progress.waiting("refit to version 3, engine vllm-1")
        clock.now += 75
        for _ in range(500):
            if "refit" in file.getvalue():
                break
            time.sleep(0.01)
    assert 'waiting="refit to version 3, engine vllm-1" for=1m15s' in file.getvalue()


def test_panel_shows_what_a_person_looks_for() -> None:
    clock = Clock()
    progress = Progress(Config(), num_steps=4, file=io.StringIO(), clock=clock)
    progress.waiting("waiting for rollouts: 1 of 2 groups ready \x1b[2J")
    clock.now += 10
    progress.step(FIGURES)
    screen = io.StringIO()
    console(screen).print(progress.render())
    shown = re.sub(r"\s+", " ", screen.getvalue())
    for part in (
        "2 of 4",
        "time left 20s",
        "0.5",
        "effective tokens/s 15",
        "lag 1",
        "2, 6",
        "25.0%",
        "waiting for rollouts: 1 of 2 groups ready",
        "10s",
    ):
        assert part in shown
    assert "\x1b[2J" not in screen.getvalue()


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_panel_runs_on_a_terminal() -> None:
    file = Terminal()
    with Progress(Config(), num_steps=4, file=file) as progress:
        progress.step(FIGURES)
        progress.note("a note above the panel")
    assert "a note above the panel" in file.getvalue()
    assert "Ctrl-C drains, twice aborts" in file.getvalue()


def test_lines_are_kept_in_the_folder_of_the_attempt(tmp_path) -> None:
    run = create_run(resolve([], ["--run.dir", str(tmp_path), "--run.name", "r"]))
    run.begin_attempt()
    with pytest.raises(ZeroDivisionError), Progress(Config(), run=run, num_steps=4, file=io.StringIO()) as progress:
        progress.note("before the attempt has its folder")
        run.begin_attempt()
        progress.step(FIGURES)
        _ = 1 // 0
    assert not (run.attempt_logs(1) / "driver.log").exists()
    lines = (run.attempt_logs(2) / "driver.log").read_text().splitlines()
    assert 'note="before the attempt has its folder"' in lines[1]
    assert " step=1 of=4 " in lines[2]
    assert lines[-1].startswith("ZeroDivisionError")
