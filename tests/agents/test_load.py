"""Agent files: loaded once, named by a digest over what they import from their folder, refused with the setting's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from molt.agents.load import agent_digest, load_agent
from molt.errors import SettingError

GOOD = "import molt.agents as agents\n\n\nclass AgentRunner(agents.AgentRunner):\n    env = agents.Env\n"


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
    ],
)
def test_file_that_is_no_agent_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=rf"train.agent_path=.*{said}"):
        load_agent(tmp_path / name)


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
