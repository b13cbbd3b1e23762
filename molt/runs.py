"""The folder of one run: its name, its settings, its attempts; a used name is refused and nothing is left half-made."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from molt.config import Config
from molt.errors import LogFullError, SettingError
from molt.hub import label
from molt.settings import dump_toml, resolve_recorded

CONFIG_FILE = "config.resolved.toml"
NAME_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """One run on disk: `config.resolved.toml`, `log/`, `checkpoints/step_N/`, `logs/attempt_N/`."""

    path: Path
    """Absolute."""

    @property
    def name(self) -> str:
        """Name of the run: the last part of its path."""
        return self.path.name

    @property
    def log(self) -> Path:
        """Folder of the trajectory log."""
        return self.path / "log"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def config_path(self) -> Path:
        """The settings that the run was made with."""
        return self.path / CONFIG_FILE

    def config(self, flags: tuple[str, ...] = ()) -> Config:
        """The settings of the run, with flags laid over them."""
        return resolve_recorded(self.config_path, flags)

    @property
    def num_attempts(self) -> int:
        """Attempts begun so far."""
        numbers = (entry.name.removeprefix("attempt_") for entry in (self.path / "logs").glob("attempt_*"))
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def attempt_logs(self, attempt: int) -> Path:
        """Folder of the log files of one attempt; attempts count from 1."""
        return self.path / "logs" / f"attempt_{attempt}"

    def begin_attempt(self) -> int:
        """Make the folder of the next attempt and return its number; two processes never get the same one."""
        while True:
            attempt = self.num_attempts + 1
            try:
                self.attempt_logs(attempt).mkdir(parents=True)
                return attempt
            except FileExistsError:
                continue
            except OSError as error:
                raise _disk_error(error, self.path) from None

    def discard_unstarted(self) -> None:
        """Take the folder away again when no log was begun in it, so that the name stays free."""
        if not self.log.exists():
            shutil.rmtree(self.path, ignore_errors=True)


def free_place(config: Config) -> tuple[Path, str]:
    """Folder and name of a new run with those settings, which name it. SettingError for a used or malformed name."""
    name = config.run.name or ""
    if not NAME_FORM.fullmatch(name):
        raise SettingError(f"run.name={name!r} is no name of a folder; use letters, digits, dot, dash and underscore, 128 at most")
    folder = Path(config.run.dir).absolute()
    path = folder / name
    if path.exists():
        raise SettingError(f"run.name={name} is used in {folder}; take another name or go on with it: molt train --resume {path}")
    return folder, name


def create_run(config: Config) -> RunDir:
    """Make the folder of a new run. SettingError for a used or malformed name, LogFullError when the disk refuses."""
    config = named(config)
    folder, name = free_place(config)
    path = folder / name
    making = folder / f".{name}.{secrets.token_hex(4)}.making"
    try:
        making.mkdir(parents=True)
        try:
            with (making / CONFIG_FILE).open("w", encoding="utf-8") as file:
                file.write(dump_toml(config))
                file.flush()
                os.fsync(file.fileno())
            making.rename(path)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise SettingError(f"run.name={name} is used in {folder}; take another name") from None
        raise _disk_error(error, folder) from None
    return RunDir(path=path)


def named(config: Config) -> Config:
    """The same settings with a name for the run: the given one, or one made from agent, model and a short id."""
    if config.run.name is not None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"name": _made_name(config)})})


def open_run(where: str | Path) -> RunDir:
    """The run at a path, or of that name in runs/. SettingError when there is none."""
    for path in (Path(where), Path("runs") / where):
        if (path / CONFIG_FILE).is_file() or (path / "log").is_dir():
            return RunDir(path=path.absolute())
    reason = "no such folder" if not Path(where).exists() else f"it holds neither {CONFIG_FILE} nor log/"
    raise SettingError(f"run={where}, {reason}; give the folder of a run, `molt runs` lists them")


def split_pin(where: str | Path) -> tuple[str, str | None]:
    """`RUN@PIN` as run and pin; a path that exists is a run whatever it is called."""
    text = str(where)
    run, at, pin = text.rpartition("@")
    return (text, None) if not at or Path(text).exists() else (run, pin)


def run_place(where: str | Path) -> str:
    """Address of a run's log: an object store's as it is, else the folder that a path or name stands for."""
    text = str(where)
    return text if "://" in text else str(open_run(text).path)


def list_runs(folder: str | Path = "runs") -> list[RunDir]:
    """The runs in a folder, oldest first."""
    found = [path for path in Path(folder).absolute().glob("*") if (path / CONFIG_FILE).is_file() and not path.name.startswith(".")]
    return [RunDir(path=path) for path in sorted(found, key=lambda path: (path / CONFIG_FILE).stat().st_mtime)]


def _made_name(config: Config) -> str:
    """<agent>--<model>--<short id>."""
    agent = Path(config.train.agent_path or config.sft.dataset or "run").stem
    model = label(config.actor.model_name_or_path or "model")
    return "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-.") or "x" for part in (agent, model)) + f"--{secrets.token_hex(3)}"


def _disk_error(error: OSError, folder: Path) -> LogFullError:
    return LogFullError(f"run.dir={folder}, {error.strerror or error}; free space there, or choose another with --run.dir FOLDER")
