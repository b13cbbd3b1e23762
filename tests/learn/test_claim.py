"""Folders of weights in shared memory: those of killed runs are freed, those of living ones and of strangers stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from molt.learn.claim import claim

OWNER = """
import sys
from pathlib import Path
from molt.learn.claim import claim

held = claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def owner(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    (folder / "weights-00000001.safetensors").write_bytes(b"weights")
    return process


def test_a_killed_run_leaves_its_weights_to_the_next_one_and_a_living_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "molt-unowned").mkdir()
    with owner(tmp_path / "molt-alive") as alive, owner(tmp_path / "molt-killed") as killed:
        killed.kill()
        killed.wait()
        descriptor = claim(tmp_path / "molt-mine")
        assert sorted(item.name for item in tmp_path.iterdir()) == ["molt-alive", "molt-mine", "molt-unowned"]
        alive.kill()
    os.close(descriptor)


def test_a_run_that_goes_on_begins_with_its_own_folder_empty(tmp_path: Path) -> None:
    with owner(tmp_path / "molt-mine") as killed:
        killed.kill()
        killed.wait()
    descriptor = claim(tmp_path / "molt-mine")
    assert sorted(item.name for item in (tmp_path / "molt-mine").iterdir()) == ["owner"]
    os.close(descriptor)
