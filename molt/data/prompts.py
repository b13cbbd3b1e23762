"""The prompt set: every row checked before anything is started, and named by its content."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from molt.config import DataSettings
from molt.data.images import Image, ImageReader
from molt.data.messages import Message, images_of, normal_messages, texts_of, told_as_text
from molt.data.rows import Row, read_rows
from molt.errors import DataError

SHOWN_PROBLEMS = 5
MOST_SKIPPED = 0.1
"""Share of malformed rows above which data.skip_malformed refuses the file all the same."""
PLACEHOLDER = re.compile(r"\s*(<[^<>]*placeholder[^<>]*>)?\s*", re.IGNORECASE)

__all__ = ["Message", "Prompt", "PromptSet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task."""

    prompt_id: str
    """blake2b-128 hex of messages, label and extras."""
    prompt_index: int
    """Place in the set, from 0."""
    messages: tuple[Message, ...]
    label: Any = None
    """What the grader needs; null when the set has none."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """The other keys of the row."""

    @property
    def images(self) -> list[Image]:
        """The images in its messages, in order."""
        return images_of(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of one file or folder, in its order."""

    prompts: tuple[Prompt, ...]
    digest: str
    """blake2b-128 hex over the prompt ids in order."""
    num_skipped: int = 0
    """Malformed rows left out by data.skip_malformed."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @classmethod
    def load(cls, path: str | Path, settings: DataSettings, *, setting: str = "data.prompt_dataset") -> PromptSet:
        """Read and check every row. DataError lists what is wrong with file and line; nothing is skipped unless told."""
        good: list[tuple[Prompt, str | None]] = []
        problems: list[str] = []
        for row in read_rows(path, setting):
            try:
                if row.values is None:
                    raise ValueError(row.problem)
                prompt, has_label = _prompt(row.values, len(good), settings, row.folder)
            except ValueError as error:
                problems.append(f"{row.place}: {error}")
                continue
            good.append((prompt, None if has_label else _no_label(row, settings)))
        if "label_key" in settings.model_fields_set or any(missing is None for _, missing in good):
            problems += [missing for _, missing in good if missing is not None]
            good = [(prompt, None) for prompt, missing in good if missing is None]
        prompts = [replace(prompt, prompt_index=index) for index, (prompt, _) in enumerate(good)]
        _refuse(path, setting, problems, len(prompts), settings)
        digest = hashlib.blake2b("\n".join(prompt.prompt_id for prompt in prompts).encode(), digest_size=16)
        return cls(prompts=tuple(prompts), digest=digest.hexdigest(), num_skipped=len(problems))


def _refuse(path: str | Path, setting: str, problems: list[str], num_good: int, settings: DataSettings) -> None:
    total = len(problems) + num_good
    if total == 0:
        raise DataError(f"{setting}={path}, it holds no rows; give a file with at least one prompt")
    is_tolerated = settings.skip_malformed and len(problems) <= MOST_SKIPPED * total
    if not problems or is_tolerated:
        return
    shown = problems[:SHOWN_PROBLEMS]
    more = f"\n  and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
    way_out = (
        f"data.skip_malformed leaves out at most {MOST_SKIPPED:.0%} of the rows"
        if settings.skip_malformed
        else "mend them, or set data.skip_malformed=true to count and skip them"
    )
    listed = "\n  ".join(shown)
    raise DataError(f"{setting}={path}, {len(problems)} of {total} rows are malformed; {way_out}:\n  {listed}{more}")


def _prompt(values: dict[str, Any], index: int, settings: DataSettings, folder: Path) -> tuple[Prompt, bool]:
    key = settings.messages_key if _get(values, settings.messages_key)[0] else settings.input_key
    is_found, value = _get(values, key)
    if not is_found:
        raise ValueError(
            f"neither data.messages_key={settings.messages_key} nor data.input_key={settings.input_key} holds a value; "
            f"its keys are {', '.join(sorted(values)) or 'none'}"
        )
    if key == settings.messages_key:
        value = told_as_text(value)
    has_images, column = _get(values, settings.images_key)
    images = ImageReader(
        column if has_images else None, folder=folder, max_images=settings.max_images, max_pixels=settings.max_image_pixels
    )
    messages = normal_messages(value, key, images)
    images.finish()
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{key} ends with an assistant message; a prompt ends before the policy speaks")
    texts = [text for message in messages for text in texts_of(message["content"])]
    if not images.num_images and all(PLACEHOLDER.fullmatch(text) for text in texts):
        raise ValueError(f"{key} is empty or a placeholder: {texts[-1][:40]!r}")
    if settings.system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": settings.system_prompt}, *messages)
    has_label, label = _get(values, settings.label_key)
    used = {name for name in (key, settings.label_key, *([settings.images_key] if images.num_images else [])) if "." not in name}
    extras = {name: item for name, item in values.items() if name not in used}
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
    content = orjson.dumps([messages, label, extras], option=options, default=_plain)
    prompt_id = hashlib.blake2b(content, digest_size=16).hexdigest()
    return Prompt(prompt_id=prompt_id, prompt_index=index, messages=messages, label=label, extras=extras), has_label


def _no_label(row: Row, settings: DataSettings) -> str:
    keys = ", ".join(sorted(row.values or {}))
    return f"{row.place}: data.label_key={settings.label_key} is not there; its keys are {keys}"


def _get(values: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Value under a key, or under a dotted path of keys; null and NaN count as absent."""
    if not _is_absent(values.get(key)):
        return True, values[key]
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or _is_absent(found.get(part)):
            return False, None
        found = found[part]
    return True, found


def _is_absent(value: Any) -> bool:
    """Null, or the NaN that columns of numbers have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    """JSON form of what Parquet cells may hold and JSON does not."""
    if isinstance(value, Image):
        return {"digest": value.digest}
    return value.hex() if isinstance(value, bytes) else str(value)
