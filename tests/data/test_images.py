"""Images of prompts: every form they come in is one normal form, and every way to be wrong is named with row and part."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from molt.config import DataSettings
from molt.data.images import Image
from molt.data.messages import images_of, texts_of
from molt.data.prompts import PromptSet
from molt.errors import DataError
from molt.log.rows import Payload

FIXTURES = Path(__file__).parent / "fixtures"


def encoded(colour: str = "red", size: tuple[int, int] = (6, 4), form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(buffer, format=form)
    return buffer.getvalue()


def one(folder: Path, content: Any, **row: Any) -> Any:
    """The content that a row of one user message becomes."""
    file = folder / "rows.jsonl"
    settings = row.pop("settings", {})
    file.write_text(json.dumps({"messages": [{"role": "user", "content": content}], "label": "1", **row}) + "\n")
    return PromptSet.load(file, DataSettings(**settings))[0].messages[0]["content"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "red.png"},
        {"type": "image", "path": "red.png"},
        {"type": "image", "image": {"path": "red.png"}},
        {"type": "image", "image": ["red.png"]},
        {"type": "image_url", "image_url": {"url": "DATA"}},
        {"type": "image_url", "image_url": "DATA"},
        {"type": "input_image", "image_url": "DATA", "detail": "auto"},
        {"type": "image", "base64": "BARE"},
    ],
)
def test_every_form_of_an_image_is_the_same_image(tmp_path: Path, part: dict[str, Any]) -> None:
    data = encoded()
    (tmp_path / "red.png").write_bytes(data)
    bare = base64.b64encode(data).decode()
    text = json.dumps(part).replace("DATA", f"data:image/png;base64,{bare}").replace("BARE", bare)
    content = one(tmp_path, [json.loads(text), {"type": "text", "text": "What is it?"}])
    assert content[1] == {"type": "text", "text": "What is it?"}
    image = content[0]["image"]
    assert (image.width, image.height, image.data) == (6, 4, data)
    assert image.digest == Payload(kind="image", data=data).payload_digest


def test_bytes_and_names_in_parquet_are_images(tmp_path: Path) -> None:
    data = encoded("blue", form="JPEG")
    row = {
        "messages": [{"role": "user", "content": "Left <image> or right <image>?"}],
        "images": [{"bytes": data, "path": "/gone/a.jpg"}] * 2,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    prompt = PromptSet.load(tmp_path / "rows.parquet", DataSettings())[0]
    kinds = [part["type"] for part in prompt.messages[0]["content"]]
    assert kinds == ["text", "image", "text", "image", "text"]
    assert texts_of(prompt.messages[0]["content"]) == ["Left ", " or right ", "?"]
    assert [image.data for image in prompt.images] == [data, data]
    assert "images" not in prompt.extras


def test_part_without_a_source_takes_the_next_of_the_column(tmp_path: Path) -> None:
    for name in ("red", "blue"):
        (tmp_path / f"{name}.png").write_bytes(encoded(name))
    content = one(tmp_path, [{"type": "image"}, {"type": "text", "text": "and <image>"}], images=["red.png", "blue.png"])
    assert [part.get("text") for part in content] == [None, "and ", None]
    assert [part["image"].data for part in content if part["type"] == "image"] == [encoded("red"), encoded("blue")]


def test_real_rows_with_images_are_prompts() -> None:
    prompts = PromptSet.load(FIXTURES / "gym_vlm_2.jsonl", DataSettings(messages_key="responses_create_params.input", label_key="answer"))
    assert [(image.width, image.height) for prompt in prompts for image in prompt.images] == [(104, 27), (164, 60)]
    assert texts_of(prompts[0].messages[0]["content"]) == ["what is written in the image?"]


def test_prompt_is_named_by_what_its_images_show(tmp_path: Path) -> None:
    ids = []
    for colour in ("red", "red", "blue"):
        (tmp_path / "it.png").write_bytes(encoded(colour))
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "image": "it.png"}]}]}) + "\n")
        ids.append(PromptSet.load(file, DataSettings())[0].prompt_id)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"image": "none.png"}, "messages[0].content[0].image: no such image file: "),
        ({"image": "empty.png"}, "the image has zero bytes"),
        ({"image": "text.png"}, "it is not an image: b'plain text'"),
        ({"image": "named.jpg"}, "the image is PNG, its name says JPEG"),
        ({"image": "cut.png"}, "the image cannot be decoded"),
        ({"image": "large.png"}, "the image has 50 x 20 pixels, data.max_image_pixels=999"),
        ({"image": "https://example.org/a.png"}, "is an address, and nothing is fetched"),
        ({"image_url": "data:image/jpeg;base64,DATA"}, "the image is PNG, its name says JPEG"),
        ({"image": 5}, "an image is bytes, a path, a data URL or a mapping with bytes or path, this is int"),
        ({"image": {"name": "x"}}, "an image is given by bytes, path or url; its keys are name"),
        ({}, "stands for image 1, and data.images_key holds 0"),
    ],
)
def test_wrong_image_is_named_with_row_and_part(tmp_path: Path, part: dict[str, Any], said: str) -> None:
    data = encoded(size=(40, 24))
    files = {"empty.png": b"", "text.png": b"plain text", "named.jpg": data, "cut.png": data[: len(data) // 2]}
    files["large.png"] = encoded(size=(50, 20))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    text = json.dumps(part).replace("DATA", base64.b64encode(data).decode())
    with pytest.raises(DataError) as error:
        one(tmp_path, [{"type": "image"} | json.loads(text)], settings={"max_image_pixels": 999})
    assert f"{tmp_path / 'rows.jsonl'}:1: messages[0].content[0]" in str(error.value) and said in str(error.value)


def test_too_many_and_unused_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(encoded())
    part = {"type": "image", "image": "red.png"}
    with pytest.raises(DataError, match=r"content\[2\].image is image 3, data.max_images=2"):
        one(tmp_path, [part] * 3, settings={"max_images": 2})
    with pytest.raises(DataError, match="holds 1 more images than the messages show; write <image>"):
        one(tmp_path, "One <image> of two", images=["red.png"] * 2)


def test_image_of_an_agent_travels_and_compares_by_content() -> None:
    picture = PIL.Image.new("RGBA", (5, 3), (255, 0, 0, 10))
    image = Image.of(picture)
    assert (image.width, image.height, image.decoded().mode, image.decoded().size) == (5, 3, "RGB", (5, 3))
    assert pickle.loads(pickle.dumps(image)) == image == Image.of(image.data)
    assert Image.of(image.data).data == image.data and "data" not in repr(image)
    assert images_of([{"role": "user", "content": [{"type": "image", "image": image}]}, {"role": "user", "content": "x"}]) == [image]


def test_animation_is_refused() -> None:
    buffer = io.BytesIO()
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="the image has 2 frames"):
        Image.of(buffer.getvalue())
