"""The tokenizer of a model folder: loaded from its own files, without remote code, and named by a digest of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from molt.data.processor import PROCESSOR_FILES
from molt.errors import SettingError

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


class Tokenizer:
    """A Hugging Face fast tokenizer behind the four things that Molt does with one: encode, decode, look up, and name it."""

    def __init__(self, inner: Any, *, name: str, digest: str, end_ids: Iterable[int] = ()) -> None:
        self.inner = inner
        self.name = name
        self.digest = digest
        """blake2b-128 hex of the tokenizer files, and of an image processor's."""
        self.end_ids = tuple(end_ids)
        """Ids that end a generation by the model's own generation_config.json or config.json."""
        # Every call of a rollout renders the whole chat again, and the members of a group share their prompt.
        self._encoded = lru_cache(maxsize=256)(self._encode)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a model folder; SettingError when there is no usable tokenizer in it."""
        from transformers import AutoTokenizer

        folder = Path(path).expanduser()
        way_out = "give a folder with the model's tokenizer.json"
        if not folder.is_dir():
            raise SettingError(f"actor.model_name_or_path={path}, no such folder; give a folder with a model and its tokenizer")
        files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        if not files:
            raise SettingError(f"actor.model_name_or_path={path}, it holds no tokenizer; {way_out}")
        try:
            inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise SettingError(
                f"actor.model_name_or_path={path}, its tokenizer cannot be loaded ({type(error).__name__}: {error}); {way_out}"
            ) from error
        if not inner.is_fast:
            raise SettingError(f"actor.model_name_or_path={path}, its tokenizer is not a fast one; {way_out}")
        digest = hashlib.blake2b(digest_size=16)
        for file in [*files, *(folder / name for name in PROCESSOR_FILES if (folder / name).is_file())]:
            data = file.read_bytes()
            digest.update(f"{file.name}\0{len(data)}\0".encode())
            digest.update(data)
        return cls(inner, name=str(path), digest=digest.hexdigest(), end_ids=_end_ids(folder))

    @property
    def template(self) -> str | None:
        """The chat template of the folder."""
        template = self.inner.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id."""
        return self.inner.eos_token_id

    @cached_property
    def adds_bos(self) -> bool:
        """Whether it puts a begin-of-sequence id before a plain text by itself. A chat template writes its own."""
        bos_id = self.inner.bos_token_id
        return bos_id is not None and list(self.inner("a")["input_ids"])[:1] == [bos_id]

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens, longest first."""
        added = self.inner.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special} | {self.inner.eos_token or ""}
        return tuple(sorted(texts - {""}, key=lambda text: (-len(text), text)))

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token."""
        return re.compile("|".join(map(re.escape, self.special_texts))) if self.special_texts else None

    def id_of(self, text: str) -> int | None:
        """The id of a token by its text; None when the vocabulary has no such token."""
        token_id = self.inner.convert_tokens_to_ids(text)
        if token_id is None or (token_id == self.inner.unk_token_id and text != self.inner.unk_token):
            return None
        return token_id

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text as it stands: nothing is added at its ends. (N,) int32."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids (N,) int32, and the first character of each (N,) int64, never falling. Read-only."""
        return self._encoded(text)

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        if not text:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        encoded = self.inner(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
        token_ids = np.array(encoded["input_ids"], np.int32)
        for array in (token_ids, starts):
            array.flags.writeable = False
        return token_ids, starts

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids, special tokens kept. A view only: ids that are no whole character become U+FFFD."""
        return self.inner.decode([int(token_id) for token_id in token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _end_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a generation, by generation_config.json or, where it names none, by config.json."""
    import orjson

    for file in (folder / "generation_config.json", folder / "config.json"):
        if not file.is_file():
            continue
        try:
            said = orjson.loads(file.read_bytes())
            found = [part.get("eos_token_id") for part in (said, said.get("text_config") or {})]
        except (orjson.JSONDecodeError, AttributeError) as error:
            raise SettingError(f"{file} is not a JSON object ({error}); mend or remove it") from error
        for ids in found:
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
