"""Rows of a data file: JSONL, Parquet, or a Hugging Face data set folder, each row with the place it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from molt.errors import DataError, SettingError

OPEN_KEYS = ("arguments", "tools")
"""Keys under which every row has keys of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row, or what is wrong with it."""

    place: str
    """file:line, or file:row (from 1) where there are no lines."""
    values: dict[str, Any] | None
    problem: str | None = None
    folder: Path = Path()
    """Where the file lies: paths in the row are relative to it."""


def read_rows(path: str | Path, setting: str) -> Iterator[Row]:
    """Rows in file order. setting is the dotted name that the path came from, for errors."""
    file = Path(path).expanduser()
    if not file.exists():
        raise SettingError(f"{setting}={path}, no such file or folder; give a JSONL or Parquet file, or a data set folder")
    if file.is_dir():
        yield from _folder_rows(file, setting)
    elif file.suffix in (".jsonl", ".ndjson", ".json"):
        yield from _jsonl_rows(file)
    elif file.suffix == ".parquet":
        yield from _parquet_rows(file)
    elif file.suffix == ".arrow":
        yield from _arrow_rows(file)
    else:
        raise SettingError(f"{setting}={path}, unknown kind of file {file.suffix!r}; give .jsonl, .parquet, or a data set folder")


def _jsonl_rows(file: Path) -> Iterator[Row]:
    data = file.read_bytes()
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    if file.suffix == ".json" and (whole := _whole_json(data)) is not None:
        for number, values in enumerate(whole, start=1):
            problem = None if isinstance(values, dict) else f"a row is a JSON object, this is {_start(orjson.dumps(values))}"
            yield Row(place=f"{file}:{number}", values=None if problem else values, problem=problem, folder=file.parent)
        return
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        line = line.rstrip(b"\r")
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            values = _loads(line)
        except orjson.JSONDecodeError as error:
            yield Row(place=place, values=None, problem=_json_problem(line, error, is_torn=number == len(lines)))
            continue
        except ValueError as error:
            yield Row(place=place, values=None, problem=str(error))
            continue
        if not isinstance(values, dict):
            yield Row(place=place, values=None, problem=f"a row is a JSON object, this is {_start(line)}")
            continue
        yield Row(place=place, values=values, folder=file.parent)


def _whole_json(data: bytes) -> list[Any] | None:
    """The rows of a file that is one JSON list, or one object; None for a file of lines."""
    try:
        values = _loads(data)
    except orjson.JSONDecodeError:
        return None
    except ValueError as error:
        raise DataError(str(error)) from error
    return values if isinstance(values, list) else [values]


def _loads(data: bytes) -> Any:
    """A JSON value. ValueError for a whole number that 64 bits do not hold: it would come out as another one."""
    values = orjson.loads(data)
    if _LONG_NUMBER.search(data):
        json.loads(data, parse_int=_held)
    return values


def _held(number: str) -> int:
    if len(number) > 20 or not -(1 << 63) <= int(number) < 1 << 64:
        raise ValueError(f"the number {number[:40]} is too large for 64 bits; write it as a text")
    return int(number)


_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def _json_problem(line: bytes, error: Exception, *, is_torn: bool) -> str:
    text = line.lstrip()
    if text.startswith((b"<<<<<<<", b"=======", b">>>>>>>")):
        return f"a merge-conflict marker: {_start(line)}"
    if text[:9].lower() in (b"<!doctype", b"<!doctyp") or text[:5].lower() == b"<html":
        return f"an HTML page, not JSON: {_start(line)}"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data; fetch the file itself"
    if b"\0" in line:
        return f"NUL bytes in the line: {_start(line)}"
    if is_torn and text.startswith((b"{", b"[")):
        return f"the last line is cut short (no line end): {_start(line)}"
    return f"not JSON ({error}): {_start(line)}"


def _start(line: bytes) -> str:
    shown = line[:40].decode("utf-8", "backslashreplace")
    return repr(shown + ("..." if len(line) > 40 else ""))


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        reader = pq.ParquetFile(file)
        yield from _columnar_rows(file, reader.iter_batches(batch_size=1024))
    except (pa.ArrowException, OSError, NotImplementedError, OverflowError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def _arrow_rows(file: Path) -> Iterator[Row]:
    try:
        with pa.memory_map(str(file)) as source:
            yield from _columnar_rows(file, pa.ipc.open_stream(source))
    except (pa.ArrowException, OSError, OverflowError) as error:
        raise DataError(f"{file} cannot be read as an Arrow stream ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def _columnar_rows(file: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield Row(place=f"{file}:{number}", values=_unfilled(values), folder=file.parent)


def _unfilled(value: Any, *, is_open: bool = False) -> Any:
    """Without the nulls that columns put into arguments and tools: a struct has the keys of all rows, whoever wrote them."""
    if isinstance(value, list):
        return [_unfilled(item, is_open=is_open) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _unfilled(item, is_open=is_open or key in OPEN_KEYS) for key, item in value.items() if not (is_open and item is None)}


def _folder_rows(folder: Path, setting: str) -> Iterator[Row]:
    """A data set folder: what datasets.save_to_disk wrote, or Parquet or JSONL files."""
    state = folder / "state.json"
    if state.is_file():
        files = [folder / entry["filename"] for entry in _json(state)["_data_files"]]
    elif (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json")["splits"]
        if len(splits) > 1 and "train" not in splits:
            raise SettingError(f"{setting}={folder}, it holds the splits {', '.join(splits)}; give the folder of one of them")
        yield from _folder_rows(folder / ("train" if "train" in splits else splits[0]), setting)
        return
    else:
        files = sorted(folder.rglob("*.parquet")) or sorted(folder.rglob("*.jsonl"))
        stems = {file.name.split("-")[0].split(".")[0] for file in files}
        if len(stems) > 1:
            files = [file for file in files if file.name.split("-")[0].split(".")[0] == "train"]
        if not files:
            said = f"it holds the splits {', '.join(sorted(stems))}" if stems else "it holds no Parquet, JSONL or Arrow file"
            raise SettingError(f"{setting}={folder}, {said}; give one file, or the folder of one split")
        if len({file.name for file in files}) < len(files):
            names = ", ".join(sorted({str(file.parent.relative_to(folder)) for file in files}))
            raise SettingError(f"{setting}={folder}, {names} hold files of one name; give the folder of one of them")
        _refuse_gaps(files, folder, setting)
    for file in files:
        yield from read_rows(file, setting)


def _refuse_gaps(files: list[Path], folder: Path, setting: str) -> None:
    """SettingError when files that are numbered `-00000-of-00002` are not all there."""
    numbered = [found for file in files if (found := _SHARD.search(file.name))]
    missing = {(number, int(found[2])) for found in numbered for number in range(int(found[2]))} - {
        (int(f[1]), int(f[2])) for f in numbered
    }
    if missing:
        number, count = min(missing)
        raise SettingError(f"{setting}={folder}, file {number:05d} of {count:05d} is missing; fetch it, or give files one by one")


_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.")


def _json(file: Path) -> Any:
    try:
        return orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON ({error})") from error
