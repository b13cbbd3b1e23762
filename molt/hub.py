"""Names of models on the Hugging Face Hub in place of folders: small files are fetched, settings checked against them, then the weights.

From the first on a model is the folder of one revision in the Hub's cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from molt.config import Config
from molt.errors import SettingError

ROOMS = ("actor", "critic", "reference")
"""Whose model_name_or_path may be a name."""
NAME = re.compile(r"(?P<model>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
"""OWNER/MODEL or OWNER/MODEL@REVISION."""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Config, tokenizer and chat template."""
WEIGHTS = "*.safetensors"


def with_fetched_models(config: Config, *, say: Callable[[str], None]) -> Config:
    """The same settings with a folder for each model that was given by its name, which holds all but the weights. SettingError where the
    Hub does not give it."""
    rooms = {}
    for room, name in _named(config).items():
        say(f"{room}.model_name_or_path={name} is no folder here, asking the Hugging Face Hub")
        folder = _fetch(f"{room}.model_name_or_path", name, SMALL_FILES)
        rooms[room] = getattr(config, room).model_copy(update={"model_name_or_path": folder})
    return config.model_copy(update=rooms)


def fetch_weights(named: Config, fetched: Config, *, say: Callable[[str], None]) -> None:
    """Put weights into the folders that with_fetched_models made of names. named, fetched: the settings before it and after."""
    for room, name in _named(named).items():
        revision = Path(getattr(fetched, room).model_name_or_path).name
        say(f"{room}.model_name_or_path={name}: weights of revision {revision}")
        _fetch(f"{room}.model_name_or_path", f"{name.partition('@')[0]}@{revision}", [WEIGHTS])


def _named(config: Config) -> dict[str, str]:
    """Names of models by their room."""
    given = {room: getattr(config, room).model_name_or_path for room in ROOMS}
    return {room: name for room, name in given.items() if name is not None and is_name(name)}


def is_name(path: str) -> bool:
    """Whether a path that is not there may name a model of the Hub."""
    return NAME.fullmatch(path) is not None and not Path(path).exists()


def label(path: str | Path) -> str:
    """Last name of a model: of its folder, or of the name under which the Hub's cache holds it."""
    folder = Path(path)
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def _fetch(setting: str, name: str, patterns: Sequence[str]) -> str:
    """The folder of a model in the Hub's cache, files of subfolders left out."""
    from huggingface_hub import snapshot_download

    match = NAME.fullmatch(name)
    assert match is not None, name
    try:
        return str(snapshot_download(match["model"], revision=match["revision"], allow_patterns=[*patterns], ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # what the Hub's errors are: not found, gated, no network, no such revision
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SettingError(
            f"{setting}={name}, no such folder, and the Hugging Face Hub does not give a model of that name "
            f"({type(error).__name__}: {why}); give a folder with a Hugging Face model, or OWNER/MODEL[@REVISION] as the Hub has it "
            "(HF_TOKEN for models that ask for one)"
        ) from None
