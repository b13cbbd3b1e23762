"""Storage profiles: what a file in stores/ may say about where a log lives and what an acknowledgement means."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from molt.config import Room
from molt.errors import SettingError
from molt.places import folder

Codec = Literal["none", "lz4", "zstd"]


class CommitSettings(Room):
    """When a group of messages is committed: at the first of the three."""

    window_ms: float = Field(gt=0)
    """Longest time that the first message of a group waits."""
    max_bytes: int = Field(gt=0)
    max_rows: int = Field(gt=0)


class QueueSettings(Room):
    """What the writer holds before it is committed."""

    max_bytes: int = Field(gt=0)
    """Past it a submit waits: back-pressure instead of a growing queue."""
    gap_timeout_s: float = Field(gt=0)
    """How long a message may wait for the one before it of the same producer."""


class UpkeepSettings(Room):
    """What the writer does between commits."""

    max_fragments: int = Field(gt=1, lt=1000)
    """Live fragments of a table past which it is compacted."""
    keep_versions: int = Field(gt=1)
    """Newest versions that clean-up keeps, beside those that a pin or a live reader needs."""
    grace_s: float = Field(1.0, ge=0)
    """Time in which a version that was the newest is kept, for readers that have just opened it."""
    max_manifest_share: float = Field(gt=0)
    """Bytes of manifests over bytes of data past which an alarm is told."""
    target_bytes: int = Field(gt=0)
    """Bytes of a compacted fragment: bounds the memory of a compaction."""
    session_bytes: int = Field(gt=0)
    """Caches of one Lance session."""


class CodecSettings(Room):
    """General compression by family of columns."""

    ids: Codec
    floats: Codec
    text: Codec


class RetentionSettings(Room):
    """How many of the newest rows keep their heavy content; absent keeps all. Light families may not outlive what they explain."""

    routing_rows: int | None = Field(None, gt=0)
    """Payloads of kind routing."""
    payload_rows: int | None = Field(None, gt=0)
    """All payloads; images go when an attempt begins. Never those that a segment names which a resumed run may train."""
    score_rows: int | None = Field(None, gt=0)
    """Per-token lists of scores."""
    token_rows: int | None = Field(None, gt=0)
    """Tokens and log-probs of segments; never those that a resumed run may train: of groups neither dropped nor trained before the second
    newest checkpoint, so that ckpt.save_interval says how much is kept at the least."""

    @model_validator(mode="after")
    def _heavy_first(self) -> RetentionSettings:
        if self.token_rows is not None and (self.payload_rows is None or self.score_rows is None):
            raise ValueError("token_rows needs payload_rows and score_rows: routing, scores and payloads go before tokens")
        return self


class Store(Room):
    """One storage profile."""

    name: str
    place: Literal["local", "memory", "s3"]
    is_synced: bool
    """Whether files and directories are synced to the medium before the acknowledgement."""
    lease: Literal["flock", "process", "expiring"]
    lease_ttl_s: float = Field(30.0, gt=0)
    """Life of an expiring lease without renewal."""
    commit: CommitSettings
    queue: QueueSettings
    upkeep: UpkeepSettings
    codec: CodecSettings
    retention: RetentionSettings = RetentionSettings()


def load_store(name: str | Path) -> Store:
    """The profile of that name in stores/, or the TOML file at that path."""
    path = Path(name)
    if path.suffix != ".toml":
        path = folder("stores") / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder("stores").glob("*.toml")))
        raise SettingError(f"log.store={name}: no such profile; choose one of {known} or give the path of a TOML file")
    try:
        return Store(name=path.stem, **tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"log.store={name}: {path} is not TOML; {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingError(f"log.store={name}: {path}: {where}={first.get('input')!r}; {first['msg']}") from error
