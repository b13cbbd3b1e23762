"""Models by their name on the Hugging Face Hub: what counts as one, what is fetched, and what is said of one that does not come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from molt.hub import is_name, label
from tests.learn.tiny import make_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def ask(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line beside a cache of the Hub and no network."""
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    code = "import sys; from molt.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that holds one model, as the Hub's library lays it out."""
    place = tmp_path / "hub" / "models--maker--tiny-1B"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    make_model(place / "snapshots" / COMMIT)
    return tmp_path / "hub"


def test_model_is_taken_by_name_and_becomes_the_folder_of_its_revision(cache: Path) -> None:
    for name in ("maker/tiny-1B", f"maker/tiny-1B@{COMMIT}"):
        done = ask(cache, "plan", "--actor.model_name_or_path", name, "--gpus", "2", "--gpu-memory-gib", "80", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["shape"]["hidden_size"] == 32
        assert f"actor.model_name_or_path={name} is no folder here, asking the Hugging Face Hub" in done.stderr


def test_weights_are_fetched_into_the_folder_of_the_same_revision(cache: Path) -> None:
    code = (
        "from molt.config import Config\nfrom molt.hub import fetch_weights, with_fetched_models\n"
        "rooms = {'actor': 'maker/tiny-1B', 'reference': '/models/a'}\n"
        "given = Config.model_validate({room: {'model_name_or_path': name} for room, name in rooms.items()})\n"
        "said = []\nfetched = with_fetched_models(given, say=said.append)\nfetch_weights(given, fetched, say=said.append)\n"
        "print(fetched.actor.model_name_or_path, fetched.reference.model_name_or_path, *said, sep='\\n')\n"
    )
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(cache / "models--maker--tiny-1B" / "snapshots" / COMMIT),
        "/models/a",
        "actor.model_name_or_path=maker/tiny-1B is no folder here, asking the Hugging Face Hub",
        f"actor.model_name_or_path=maker/tiny-1B: weights of revision {COMMIT}",
    ]


def test_name_that_the_hub_does_not_give_is_told_with_the_reason(cache: Path) -> None:
    done = ask(cache, "train", "--actor.model_name_or_path", "maker/other", "--dry-run")
    told = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    assert "actor.model_name_or_path=maker/other, no such folder, and the Hugging Face Hub does not give a model of that name (" in told
    assert "give a folder with a Hugging Face model, or OWNER/MODEL[@REVISION]" in told


@pytest.mark.parametrize(
    "path, expected",
    [
        ("Qwen/Qwen3-4B", True),
        ("Qwen/Qwen3-4B@refs/pr/3", True),
        ("Qwen3-4B", False),  # the old names without an owner are not models of today, and look like a folder
        ("./Qwen/Qwen3-4B", False),
        ("/models/Qwen3-4B", False),
        ("~/Qwen3-4B", False),
        ("a/b/c", False),
        ("s3://models/a", False),
    ],
)
def test_what_counts_as_a_name(path: str, expected: bool) -> None:
    assert is_name(path) == expected


def test_folder_that_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_name("models/tiny") and is_name("models/other")


def test_label_of_a_fetched_model_is_its_name() -> None:
    assert label(f"/cache/hub/models--maker--tiny-1B/snapshots/{COMMIT}") == "tiny-1B"
    assert label("/models/tiny") == label("models/tiny/") == "tiny"
