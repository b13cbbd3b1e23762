"""Images as data sets and agents give them: encoded bytes, decoded once to see that they can be, and named by their content.

Nothing is fetched from the network: an address that is no file and no data URL is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt.errors import SettingError
from molt.log.rows import payload_name

SUFFIXES = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".gif": "GIF", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF",
}  # fmt: skip
"""Formats that are taken, by the ends of file names."""
MAX_PIXELS = 1 << 24
"""Default of data.max_image_pixels."""
MARKER = "<image>"
"""What stands in the text of a row for the next image of data.images_key."""
PART_KINDS = ("image", "image_url", "input_image")
_DATA_URL = re.compile(r"data:image/([\w.+-]+);base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One picture as it was given. Equal content is equal."""

    digest: str
    """Its payload in the log."""
    width: int
    height: int
    data: bytes = field(repr=False, compare=False)
    """The encoded file: PNG, JPEG, ..."""

    @classmethod
    def of(cls, source: Any, *, folder: str | Path | None = None, max_pixels: int = MAX_PIXELS) -> Image:
        """From bytes, a path (relative to folder), a data URL, base64, {"bytes", "path"}, {"url"}, or a PIL image.

        ValueError says what is wrong: no such file, nothing in it, no image, another format than its name says, too large.
        """
        if isinstance(source, Image):
            return source if source.width * source.height <= max_pixels else cls._read(source.data, None, max_pixels)
        if isinstance(source, bytes | bytearray | memoryview):
            return cls._read(bytes(source), None, max_pixels)
        if isinstance(source, str | Path):
            return cls._read(*_from_text(str(source), Path(folder or ".")), max_pixels)
        if isinstance(source, Mapping):
            if isinstance(source.get("bytes"), bytes):
                return cls._read(source["bytes"], None, max_pixels)
            named = next((source[key] for key in ("url", "path", "image", "base64") if source.get(key) is not None), None)
            if named is None:
                raise ValueError(f"an image is given by bytes, path or url; its keys are {', '.join(map(str, source)) or 'none'}")
            return cls.of(named, folder=folder, max_pixels=max_pixels)
        if hasattr(source, "save") and hasattr(source, "getbbox"):
            buffer = io.BytesIO()
            source.save(buffer, format="PNG")
            return cls._read(buffer.getvalue(), None, max_pixels)
        raise ValueError(f"an image is bytes, a path, a data URL or a mapping with bytes or path, this is {type(source).__name__}")

    @classmethod
    def _read(cls, data: bytes, said: str | None, max_pixels: int) -> Image:
        """said: the format that name or address gives."""
        pil = pillow()
        if not data:
            raise ValueError("the image has zero bytes")
        try:
            with warnings.catch_warnings(), pil.open(io.BytesIO(data)) as opened:
                warnings.simplefilter("ignore", pil.DecompressionBombWarning)
                if opened.width * opened.height > max_pixels:
                    raise ValueError(
                        f"the image has {opened.width} x {opened.height} pixels, data.max_image_pixels={max_pixels}; scale it or raise that"
                    )
                if getattr(opened, "n_frames", 1) > 1:
                    raise ValueError(f"the image has {opened.n_frames} frames; give one picture")
                if opened.format not in SUFFIXES.values():
                    raise ValueError(f"the image is of format {opened.format}; give one of {', '.join(sorted(set(SUFFIXES.values())))}")
                if said is not None and said != opened.format:
                    raise ValueError(f"the image is {opened.format}, its name says {said}; name it as what it is")
                opened.load()
                width, height = opened.width, opened.height
        except pil.UnidentifiedImageError:
            raise ValueError(f"it is not an image: {data[:16]!r}...") from None
        except (OSError, SyntaxError, pil.DecompressionBombError) as error:
            raise ValueError(f"the image cannot be decoded ({type(error).__name__}: {error})") from error
        return cls(digest=payload_name("image", (), "bytes", data), width=width, height=height, data=data)

    def decoded(self) -> Any:
        """A PIL image in RGB: what every processor is given."""
        with pillow().open(io.BytesIO(self.data)) as opened:
            return opened.convert("RGB")


class ImageReader:
    """The images of one row of a data set, in the order of its messages."""

    def __init__(self, column: Any, *, folder: Path, max_images: int, max_pixels: int) -> None:
        """column: what the row has under data.images_key; None when it has nothing there."""
        if column is not None and not isinstance(column, list | tuple):
            column = [column]
        self.has_column = column is not None
        self._column: Iterator[Any] = iter(column or ())
        self._folder = folder
        self._max_images = max_images
        self._max_pixels = max_pixels
        self.num_images = 0

    def of_part(self, part: Mapping[str, Any], path: str) -> Image:
        """The image of a content part; one without a source takes the next of the column."""
        keys = ("image", "image_url", "url", "path", "bytes", "base64")
        key = next((key for key in keys if part.get(key) is not None), None)
        return self.next_of_column(path) if key is None else self._taken(part[key], f"{path}.{key}")

    def next_of_column(self, path: str) -> Image:
        """The next image of the row's column."""
        source = next(self._column, None)
        if source is None:
            raise ValueError(f"{path} stands for image {self.num_images + 1}, and data.images_key holds {self.num_images}")
        return self._taken(source, path)

    def finish(self) -> None:
        """ValueError when the column holds more images than the messages show."""
        left = sum(1 for _ in self._column)
        if left:
            raise ValueError(f"data.images_key holds {left} more images than the messages show; write {MARKER} where each belongs")

    def _taken(self, source: Any, path: str) -> Image:
        if isinstance(source, list | tuple) and len(source) == 1:
            source = source[0]
        self.num_images += 1
        if self.num_images > self._max_images:
            raise ValueError(f"{path} is image {self.num_images}, data.max_images={self._max_images}; leave some out or raise it")
        try:
            return Image.of(source, folder=self._folder, max_pixels=self._max_pixels)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _from_text(text: str, folder: Path) -> tuple[bytes, str | None]:
    """Bytes, and the format that the name gives."""
    if found := _DATA_URL.match(text):
        said = {"jpg": "JPEG"}.get(found[1].lower(), found[1].upper())
        return _decoded(text[found.end() :]), said
    if "://" in text and not text.startswith("file://"):
        raise ValueError(f"{text[:60]!r} is an address, and nothing is fetched; give a file, bytes or a data URL")
    if _BASE64.fullmatch(text):
        return _decoded(text), None
    file = folder / Path(text.removeprefix("file://")).expanduser()
    if not file.is_file():
        raise ValueError(f"no such image file: {file}")
    return file.read_bytes(), SUFFIXES.get(file.suffix.lower())


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its base64 cannot be read ({error})") from error


def pillow() -> Any:
    """Pillow's module for images; SettingError where it is not installed."""
    try:
        import PIL.Image
    except ImportError as error:
        raise SettingError("images need Pillow, which is not installed; pip install 'molt-log[train]'") from error
    return PIL.Image
