"""The image processor of a model folder: what an image becomes, as ids and as tensors.

    in the prompt that an engine is sent   one placeholder an image                                        <image>
    in the ids that the model consumes     its expansion: markers (template) and features (image)    <fake><global-img><image>*64<fake>

Both forms are kept apart by name: expand() leads from the first to the second, contract() back, and each checks the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molt.data.images import Image
from molt.errors import LineageError, SettingError
from molt.log.rows import Payload
from molt.model_shape import IMAGE_FAMILIES, model_type

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
KEPT = 64
KEPT_BYTES = 256 << 20
"""Images, and bytes of them, whose expansion is remembered: the members of a group and the turns of a rollout share theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One payload of an image."""

    name: str
    """image: the encoded bytes; else the name of a tensor."""
    payload: Payload

    @property
    def payload_digest(self) -> str:
        """Its name in the log."""
        return self.payload.payload_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """What one image becomes."""

    image: Image
    token_ids: np.ndarray
    """(n,) int32: markers and features."""
    is_feature: np.ndarray
    """(n,) bool: tokens whose embedding is a feature of the image."""
    parts: tuple[Part, ...]
    """The encoded bytes, then each tensor of the processor, tiles first: (tiles, ...)."""

    def tensors(self) -> dict[str, np.ndarray]:
        """What the model is given, by name."""
        return {part.name: part.payload.to_array() for part in self.parts if part.payload.kind == "tensor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image in the ids that a model consumes."""

    expansion: Expansion
    position: int
    """First token of its expansion."""

    @property
    def end(self) -> int:
        """Token after its last."""
        return self.position + len(self.expansion.token_ids)

    def check_whole(self, token_ids: np.ndarray) -> None:
        """LineageError unless these ids hold its expansion, whole, in its place."""
        if not np.array_equal(token_ids[self.position : self.end], self.expansion.token_ids):
            digest = self.expansion.image.digest
            raise LineageError(f"image {digest} is not whole at tokens {self.position} to {self.end} of {len(token_ids)}")

    def moved(self, by: int) -> PlacedImage:
        """The same image that many tokens later."""
        return PlacedImage(expansion=self.expansion, position=self.position + by)


class ImageProcessor:
    """The processor of one model."""

    def __init__(self, inner: Any, *, name: str) -> None:
        self.inner = inner
        self.name = name
        tokenizer = inner.tokenizer
        self.placeholder: str = str(inner.image_token)
        found = tokenizer.convert_tokens_to_ids(self.placeholder)
        # A token that the vocabulary lacks resolves to the unknown token: then ordinary tokens would count as images.
        others = {tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
        if found is None or found in others:
            raise SettingError(
                f"actor.model_name_or_path={name}, its tokenizer has no token of its own for {self.placeholder!r}, an image's placeholder"
            )
        self.placeholder_id = int(found)
        self._seen: dict[str, Expansion] = {}
        """By digest, the oldest first."""
        self._one = threading.Lock()
        self._lengths: dict[tuple[int, int], int] = {}

    @classmethod
    def load(cls, path: str | Path) -> ImageProcessor | None:
        """The processor of a model folder; None for a model that takes no images. SettingError for a family that is not supported."""
        folder = Path(path).expanduser()
        if not any((folder / name).is_file() for name in PROCESSOR_FILES):
            return None
        kind = model_type(folder)
        if kind not in IMAGE_FAMILIES:
            return None
        from transformers import AutoProcessor

        try:
            inner = AutoProcessor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise SettingError(
                f"actor.model_name_or_path={path}, its image processor cannot be loaded ({type(error).__name__}: {error})"
            ) from error
        return cls(inner, name=str(path))

    @property
    def template(self) -> str | None:
        """Its chat template, which shows images; None when the model has it with its tokenizer alone."""
        template = getattr(self.inner, "chat_template", None)
        return template.get("default") if isinstance(template, dict) else template

    def knows(self, image: Image) -> bool:
        """Whether its expansion is at hand."""
        return image.digest in self._seen

    def expansion(self, image: Image) -> Expansion:
        """Ids and tensors of one image: at once where it was seen lately, else a fraction of a second. Any thread may call it."""
        found = self._seen.get(image.digest)
        if found is None:
            with self._one:
                found = self._seen.get(image.digest) or self._expansion(image)  # the members of a group ask at once
                self._seen[image.digest] = found
                while len(self._seen) > KEPT or (len(self._seen) > 1 and self._num_bytes() > KEPT_BYTES):
                    del self._seen[next(iter(self._seen))]
        return found

    def _num_bytes(self) -> int:
        return sum(part.payload.size_bytes for item in self._seen.values() for part in item.parts)

    def _expansion(self, image: Image) -> Expansion:
        # An expansion begins and ends with special tokens, so its ids do not depend on the text around it.
        made = self.inner(text=self.placeholder, images=[image.decoded()], return_tensors="np", add_special_tokens=False)
        token_ids = np.asarray(made["input_ids"], np.int32).reshape(-1)
        is_feature = token_ids == self.placeholder_id
        tensors = {name: _tiles(name, np.asarray(value)) for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        parts = [Part(name="image", payload=Payload(kind="image", data=image.data))]
        parts += [
            Part(name=name, payload=Payload.of_array("tensor", tensor, is_compressed=True)) for name, tensor in sorted(tensors.items())
        ]
        num_tiles = {len(tensor) for tensor in tensors.values()}
        if not is_feature.any() or len(num_tiles) != 1 or int(is_feature.sum()) % num_tiles.pop():
            raise LineageError(
                f"image {image.digest}: its processor gave {int(is_feature.sum())} image tokens for tensors of "
                f"{', '.join(f'{name} {tensor.shape}' for name, tensor in tensors.items())}; every tile needs equally many"
            )
        for array in (token_ids, is_feature):
            array.flags.writeable = False
        return Expansion(image=image, token_ids=token_ids, is_feature=is_feature, parts=tuple(parts))

    def length(self, image: Image) -> int:
        """Tokens of an image; images of one size have equally many, so that a whole data set is measured quickly."""
        size = (image.width, image.height)
        if size not in self._lengths:
            self._lengths[size] = len(self.expansion(image).token_ids)
        return self._lengths[size]

    def expand(self, token_ids: np.ndarray, images: Sequence[Image]) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
        """Ids with one placeholder an image, as the model consumes them. LineageError when there is not one image for each placeholder."""
        places = np.flatnonzero(token_ids == self.placeholder_id)
        if len(places) != len(images):
            raise LineageError(f"{len(places)} placeholders {self.placeholder!r} for {len(images)} images; each stands for one image")
        parts: list[np.ndarray] = []
        placed: list[PlacedImage] = []
        begin, length = 0, 0
        for place, image in zip(places.tolist(), images, strict=True):
            expansion = self.expansion(image)
            parts += [token_ids[begin:place], expansion.token_ids]
            placed.append(PlacedImage(expansion=expansion, position=length + place - begin))
            length = placed[-1].end
            begin = place + 1
        whole = np.concatenate([*parts, token_ids[begin:]]).astype(np.int32)
        assert np.array_equal(contract(whole, placed, self.placeholder_id), token_ids), "what was expanded contracts to the same"
        return whole, tuple(placed)


def contract(token_ids: np.ndarray, placed: Iterable[PlacedImage], placeholder_id: int) -> np.ndarray:
    """Ids as an engine is sent them: one placeholder in place of each expansion. LineageError where an expansion is not whole."""
    parts: list[np.ndarray] = []
    begin = 0
    for item in placed:
        item.check_whole(token_ids)
        parts += [token_ids[begin : item.position], np.array([placeholder_id], np.int32)]
        begin = item.end
    return np.concatenate([*parts, token_ids[begin:]]).astype(np.int32)


def _tiles(name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of one image with its tiles first; a mask as booleans, an eighth of what processors give."""
    if value.ndim > 4 or (name == "pixel_attention_mask" and value.ndim > 3):
        value = value[0]
    return value.astype(bool) if name == "pixel_attention_mask" else value


def named_tensors(items: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The tensors of several images as one, tiles after tiles. LineageError when they do not fit each other."""
    found = list(items)
    if len({tuple((name, tensor.shape[1:]) for name, tensor in sorted(item.items())) for item in found}) > 1:
        shapes = sorted({f"{name} {tensor.shape[1:]}" for item in found for name, tensor in item.items()})
        raise LineageError(
            f"images of one batch have tensors of different shapes: {', '.join(shapes)}; their processor must make equal tiles"
        )
    return {name: np.concatenate([item[name] for item in found]) for name in found[0]} if found else {}
