"""Settings from TOML files and dotted flags, laid over each other from left to right into one checked Config."""

from __future__ import annotations

import difflib
import hashlib
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pydantic

from molt.config import Config, Room
from molt.errors import SettingError
from molt.settings_rules import check

__all__ = [
    "RENAMED",
    "check",
    "config_digest",
    "dump_toml",
    "field_types",
    "flatten",
    "parse_flags",
    "resolve",
    "resolve_recorded",
    "with_whole_paths",
]

RENAMED: dict[str, str] = {
    "actor.adam.lr": "actor.learning_rate",
    "actor.adam.betas": "actor.adam_betas",
    "actor.max_norm": "actor.max_grad_norm",
    "actor.lr_scheduler": "actor.schedule",
    "actor.gradient_checkpoint": "actor.gradient_checkpointing",
    "actor.loss_agg_mode": "algo.loss.aggregation",
    "algo.kl.init_coef": "algo.kl.coef",
    "algo.advantage.lam": "algo.advantage.lambd",
    "algo.advantage.is_correction_gating": "algo.advantage.gate",
    "algo.dynamic_filtering_range": "algo.reward.filter_range",
    "ckpt.save_steps": "ckpt.save_interval",
    "ckpt.max_num": "ckpt.keep",
    "critic.adam.lr": "critic.learning_rate",
    "eval.dataset": "data.eval_dataset",
    "eval.steps": "eval.interval",
    "fsdp.param_dtype": "actor.dtype",
    "ref.model_name_or_path": "reference.model_name_or_path",
    "reward.clip_range": "algo.reward.clip",
    "train.num_episodes": "train.num_epochs",
    "vllm.sync_backend": "vllm.weight_transfer",
}
"""Names that Molt has published before, and the name that each has now. Giving the old one is an error that says the new one."""


def resolve(files: Iterable[str | Path] = (), flags: Sequence[str] = ()) -> Config:
    """The settings of a run: defaults, then TOML files from left to right, then flags. SettingError names file or flag."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file in files:
        for key, value in _read_toml(Path(file)).items():
            values[key], origin[key] = value, str(file)
    for key, value in parse_flags(flags).items():
        values[key], origin[key] = value, f"--{key}"
    try:
        return Config.model_validate(_nest(_corrected(values)))
    except pydantic.ValidationError as error:
        raise SettingError(_told(error, origin)) from None


def resolve_recorded(file: str | Path, flags: Sequence[str] = ()) -> Config:
    """The settings that a run recorded, and flags over them. Its record holds every setting; what has its default there counts as not
    given, as it was when the run began."""
    config, said = resolve([file], flags), parse_flags(flags)
    values, defaults = flatten(config), flatten(Config())
    for key in values.keys() - said.keys():
        *rooms, name = key.split(".")
        if values[key] == defaults[key]:
            reduce(getattr, rooms, config).model_fields_set.discard(name)
    return config


def _corrected(values: dict[str, Any]) -> dict[str, Any]:
    """Correction per token where generation runs ahead and nothing was said of it: its batches mix policy versions."""
    queue = values.get("train.async_queue_size", Config().train.async_queue_size)
    if queue == 0 or "algo.advantage.is_correction_level" in values:
        return values
    return values | {"algo.advantage.is_correction_level": "token"}


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Dotted flags as {key: value}: `--a.b X`, `--a.b=X`, dashes or underscores, `--a.b` for true, two values for a band."""
    values: dict[str, Any] = {}
    place = 0
    while place < len(flags):
        word = flags[place]
        place += 1
        if not word.startswith("--") or len(word) < 3:
            raise SettingError(f"{word!r} is not a setting; settings are given as --room.name VALUE")
        name, equals, first = word[2:].partition("=")
        key = _known_key(name.replace("-", "_"), f"--{name}")
        words = [first] if equals else []
        if not equals:
            while place < len(flags) and not flags[place].startswith("--"):
                words.append(flags[place])
                place += 1
        values[key] = _parse_words(key, words)
    return values


def field_types(model: type[Room] = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted setting with its type."""
    known: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Room):
            known.update(field_types(kind, f"{prefix}{name}."))
        else:
            known[f"{prefix}{name}"] = kind
    return known


def flatten(config: Config) -> dict[str, Any]:
    """Every dotted setting with its value."""
    nested = config.model_dump(mode="json")
    flat: dict[str, Any] = {}
    for key in field_types():
        value: Any = nested
        for part in key.split("."):
            value = value[part]
        flat[key] = value
    return flat


PATHS = (
    "actor.model_name_or_path", "ckpt.output_dir", "critic.model_name_or_path", "data.eval_dataset", "data.prompt_dataset", "log.store",
    "reference.model_name_or_path", "run.dir", "sft.dataset", "train.agent_path",
)  # fmt: skip
"""Settings that name a file or folder."""


def with_whole_paths(config: Config) -> Config:
    """The same settings, paths from the root on: a run is resumed and replayed from any folder, and its record says which file it read."""
    rooms: dict[str, Room] = {}
    for key in PATHS:
        room, _, name = key.partition(".")
        own = rooms.get(room, getattr(config, room))
        value = getattr(own, name)
        is_profile = key == "log.store" and not str(value).endswith(".toml")
        if value is not None and "://" not in value and not is_profile:
            rooms[room] = own.model_copy(update={name: str(Path(value).expanduser().absolute())})
    return config.model_copy(update=rooms)


def dump_toml(config: Config) -> str:
    """The settings as TOML; what is null is left out, since absent means null."""
    import tomli_w

    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def config_digest(config: Config) -> str:
    """blake2b-128 hex over the settings as JSON: the config_digest of attempt_started."""
    return hashlib.blake2b(config.model_dump_json().encode(), digest_size=16).hexdigest()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError(f"config={path}, {error.strerror or error}; give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise SettingError(f"config={path}, it is not UTF-8 text; give the path of a TOML file") from None
    try:
        nested = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"config={path}, {error}; mend that line") from None
    flat: dict[str, Any] = {}
    _flatten_tables(nested, "", str(path), flat)
    return flat


def _flatten_tables(table: dict[str, Any], prefix: str, where: str, flat: dict[str, Any]) -> None:
    for name, value in table.items():
        key = f"{prefix}{name.replace('-', '_')}"
        if isinstance(value, dict):
            _flatten_tables(value, f"{key}.", where, flat)
        else:
            flat[_known_key(key, where)] = [None if part == "none" else part for part in value] if isinstance(value, list) else value


def _known_key(key: str, where: str) -> str:
    """The key when it is known; else an error with the new name, or the nearest one."""
    known = field_types()
    if key in known:
        return key
    if key in RENAMED:
        raise SettingError(f"{key} in {where}, it has a new name; write {RENAMED[key]}")
    if any(name.startswith(f"{key}.") for name in known):
        raise SettingError(
            f"{key} in {where}, it is a group of settings; give one of {', '.join(n for n in known if n.startswith(f'{key}.'))}"
        )
    near = max(known, key=lambda name: _likeness(key, name))
    hint = f"did you mean {near}?" if _likeness(key, near) >= 0.6 else "`molt settings` lists all"
    raise SettingError(f"{key} in {where}, no setting has this name; {hint}")


def _likeness(key: str, name: str) -> float:
    """0 to 1: how alike two dotted names are; a beginning of a name counts as the name."""
    asked, known = key.rpartition(".")[2], name.rpartition(".")[2]
    last = 1.0 if len(asked) >= 4 and known.startswith(asked) else difflib.SequenceMatcher(None, asked, known).ratio()
    rooms = difflib.SequenceMatcher(None, key.rpartition(".")[0], name.rpartition(".")[0]).ratio()
    return max(difflib.SequenceMatcher(None, key, name).ratio(), 0.3 * rooms + 0.7 * last if rooms > 0 else 0.9 * last)


def _parse_words(key: str, words: list[str]) -> Any:
    """The value that the words after a flag stand for, by the type of the setting."""
    kinds = _members(field_types()[key])
    if not words:
        if bool in kinds:
            return True
        raise SettingError(f"--{key}, it has no value; write --{key} VALUE")
    if len(words) == 1 and types.NoneType in kinds and words[0].lower() in ("none", "null"):
        return None
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        parts = [part for word in words for part in word.strip("[]()").replace(",", " ").split()]
        if len(parts) == 1 and not any(types.NoneType in _members(end) for kind in kinds for end in typing.get_args(kind)):
            raise SettingError(f"--{key} {parts[0]}, it takes two values; write --{key} LOW HIGH")
        if len(parts) == 1:
            parts = ["none", parts[0]]
        return [None if part.lower() in ("none", "null") else _scalar(part) for part in parts]
    if len(words) > 1:
        raise SettingError(f"--{key} {' '.join(words)}, it takes one value, got {len(words)}; quote it or drop {' '.join(words[1:])!r}")
    return words[0] if str in kinds else _scalar(words[0], is_literal=any(typing.get_origin(kind) is typing.Literal for kind in kinds))


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _scalar(word: str, *, is_literal: bool = False) -> Any:
    """A number or a truth value where the word is one, else the word."""
    lowered = word.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return int(word) if is_literal or lowered.lstrip("+-").isdigit() else float(word)
    except ValueError:
        return word


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *rooms, name = key.split(".")
        room = nested
        for part in rooms:
            room = room.setdefault(part, {})
        room[name] = value
    return nested


def _told(error: pydantic.ValidationError, origin: dict[str, str]) -> str:
    """Each wrong value on a line: setting=value, where it was given, what is expected."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        key = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in origin), ".".join(parts))
        where = origin.get(key, "")
        where = "" if where.startswith("--") else f" in {where}"
        reason = item["msg"][0].lower() + item["msg"][1:]
        lines.setdefault(key, f"{key}={item['input']!r}{where}, {reason}; give a value of that kind")
    return "\n".join(lines.values())


def _without_none(value: Any) -> Any:
    """The same without nulls, which TOML lacks: an open end of a band is written as "none", a band open at both ends not at all."""
    if isinstance(value, dict):
        kept = {name: _without_none(part) for name, part in value.items() if part is not None}
        return {name: part for name, part in kept.items() if part != [] and part != {}}
    if isinstance(value, list):
        return [] if all(part is None for part in value) else ["none" if part is None else part for part in value]
    return value
