"""Agent files: loaded once, named by a digest over what they import from their folder, refused with the setting's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from molt.agents.load import agent_digest, load_agent
from molt.errors import SettingError

GOOD = """import molt.agents as agents


class One(agents.Env):
    async def step(self, action):
        return agents.Result(terminated=True, truncated=False)


class AgentRunner(agents.AgentRunner):
    env = One
"""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.py", None, "no such file"),
        ("agent.txt", GOOD, "not a Python file"),
        ("empty.py", "", "exports no AgentRunner"),
        ("plain.py", "from molt.agents import AgentRunner\n", "exports AgentRunner="),
        ("other.py", "AgentRunner = 5\n", "exports AgentRunner=5"),
        ("broken.py", "import no_such_module_here\n", "cannot be imported .ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("syntax.py", "def (:\n", "cannot be imported .SyntaxError"),
        ("place.py", "limit = 1\nassert limit > 1, 'too low'\n", "cannot be imported .AssertionError: too low in line 2."),
        ("exit.py", "import sys\n\nsys.exit(3)\n", "cannot be imported .SystemExit: 3 in line 3."),
        ("no_env.py", GOOD.replace("env = One", "pass"), "sets no env and overrides neither make_env nor run"),
        ("instance.py", GOOD.replace("env = One", "env = One(None)"), "has env=<.*; give a class derived from molt.agents.Env"),
        ("no_step.py", GOOD.replace("env = One", "env = agents.Env"), "its Env has no step"),
        ("plain_step.py", GOOD.replace("async def step", "def step"), "One.step is not async; write `async def step`"),
        ("plain_run.py", GOOD.replace("env = One", "\n    def run(self, prompt, model): ..."), "AgentRunner.run is not async"),
    ],
)
def test_file_that_is_no_agent_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=rf"train.agent_path=.*{said}"):
        load_agent(tmp_path / name)


def test_step_behind_a_decorator_is_taken_as_what_it_wraps(tmp_path: Path) -> None:
    decorated = GOOD.replace("class One", "def logged(step):\n    return lambda self, action: step(self, action)\n\n\nclass One")
    (tmp_path / "decorated.py").write_text(decorated.replace("    async def", "    @logged\n    async def"))
    assert load_agent(tmp_path / "decorated.py").runner.env is not None


def test_agent_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(GOOD)
    assert load_agent(tmp_path / "once.py").runner is load_agent(str(tmp_path / "once.py")).runner


def test_two_agents_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "agent.py").write_text(GOOD + f"    mark = {folder!r}\n")
    assert [load_agent(tmp_path / folder / "agent.py").runner.mark for folder in ("a", "b")] == ["a", "b"]  # type: ignore[attr-defined]


def test_digest_covers_the_modules_beside_the_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import grading_rules_x\nfrom tools_x import one\n" + GOOD)
    (tmp_path / "grading_rules_x.py").write_text("limit = 1\n")
    (tmp_path / "unrelated_x.py").write_text("x = 1\n")
    (tmp_path / "tools_x").mkdir()
    (tmp_path / "tools_x" / "__init__.py").write_text("")
    (tmp_path / "tools_x" / "one.py").write_text("y = 1\n")
    first = load_agent(tmp_path / "agent.py").digest
    (tmp_path / "unrelated_x.py").write_text("x = 2\n")
    assert agent_digest(tmp_path / "agent.py") == first
    for changed in ("grading_rules_x.py", "tools_x/one.py"):
        before = agent_digest(tmp_path / "agent.py")
        (tmp_path / changed).write_text("limit = 2\n")
        assert agent_digest(tmp_path / "agent.py") != before
