"""A tiny world with images, made offline: models of SmolVLM's (Idefics3) and LLaVA's shape with their processors, and pictures to count in.

For SmolVLM an image becomes `num_tiles` tiles of IMAGE_SIZE pixels and their overview, each of IMAGE_TOKENS tokens, between markers:

    <fake_token_around_image><row_1_col_1><image>*4 ... newline <fake_token_around_image><global-img><image>*4<fake_token_around_image>
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from molt.data.tiny import END, SPECIAL, make_tokenizer

IMAGE = "<image>"
IMAGE_SIZE = 32
PATCH_SIZE = 8
SCALE_FACTOR = 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE // SCALE_FACTOR) ** 2
"""Tokens of a tile: 4."""
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}  # fmt: skip
"""Sizes of the towers."""
MARKERS = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
MOST_TILES = 3
"""Rows and columns of tiles that have markers."""
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}{{- '<image>' if part['type'] == 'image' else part['text'] -}}{%- endfor -%}"
    "{%- endif -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_processor(folder: Path, *, num_tiles: int = 1) -> Any:
    """Write tokenizer, template and image processor. num_tiles: tiles along the longest edge; 1 is no tiles, the overview alone."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    places = [f"<row_{row}_col_{column}>" for row in range(1, MOST_TILES + 1) for column in range(1, MOST_TILES + 1)]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*MARKERS, *places)], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": num_tiles * IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}, do_image_splitting=num_tiles > 1
    )
    processor = Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE)
    processor.save_pretrained(str(folder))
    return processor


def make_vision_model(
    folder: Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 2, num_tiles: int = 1, spread: float = 0.02
) -> None:
    """Write a freshly initialised model of SmolVLM's shape, its tokenizer and its processor as a Hugging Face folder.

    spread: standard deviation of its weights; a larger one lets its pictures weigh on what it says.
    """
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    processor = make_processor(folder, num_tiles=num_tiles)
    end = SPECIAL.index(END)
    config = Idefics3Config(
        text_config=text_config(len(processor.tokenizer), hidden_size=hidden_size, num_layers=num_layers, spread=spread),
        vision_config={**VISION, "initializer_range": spread},
        scale_factor=SCALE_FACTOR,
        image_token_id=processor.image_token_id,
        pad_token_id=0,
        eos_token_id=end,
        tie_word_embeddings=False,
        initializer_range=spread,
    )
    save_model(Idefics3ForConditionalGeneration, config, folder, seed=seed)


def text_config(vocab_size: int, *, hidden_size: int, num_layers: int, spread: float) -> dict[str, Any]:
    """The language model of both shapes: a Llama."""
    return {
        "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": SPECIAL.index(END),
        "tie_word_embeddings": False, "initializer_range": spread,
    }  # fmt: skip


def save_model(kind: Any, config: Any, folder: Path, *, seed: int) -> None:
    """Write a model with random weights that depend on the seed alone."""
    import torch

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = kind(config)
    finally:
        torch.set_rng_state(state)
    model.generation_config.eos_token_id = SPECIAL.index(END)
    model.save_pretrained(str(folder))


def make_llava_model(folder: Path, *, seed: int = 0, spread: float = 0.02) -> None:
    """Write a freshly initialised model of LLaVA's shape: an image is 16 tokens without markers, each a patch of a CLIP tower."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer.add_tokens([AddedToken(IMAGE, special=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    images = CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    strategy = "default"
    processor = LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH_SIZE, vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
    processor.save_pretrained(str(folder))
    end = SPECIAL.index(END)
    text = text_config(len(tokenizer), hidden_size=64, num_layers=2, spread=spread)
    vision = {"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3, "projection_dim": 64, "initializer_range": spread}
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=processor.image_token_id, vision_feature_layer=-2,
        vision_feature_select_strategy=strategy, tie_word_embeddings=False, initializer_range=spread, pad_token_id=0, eos_token_id=end,
    )  # fmt: skip
    save_model(LlavaForConditionalGeneration, config, folder, seed=seed)


COLOURS = ("red", "green", "blue", "orange", "purple", "black")
CELLS = 4
"""Shapes stand in cells of a grid of so many rows and columns, so that none hides another."""


def make_pictures(folder: Path, *, num_prompts: int, seed: int = 0, num_pixels: int = 48, most: int = 6) -> Path:
    """Draw pictures of circles and squares, and write prompts.jsonl beside them: a picture, a question, the number of circles."""
    import random

    from PIL import Image, ImageDraw

    rng = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_prompts):
        picture = Image.new("RGB", (num_pixels, num_pixels), "white")
        draw = ImageDraw.Draw(picture)
        cell = num_pixels / CELLS
        num_circles = 0
        for place in rng.sample(range(CELLS * CELLS), rng.randint(1, most)):
            left, top = cell * (place % CELLS), cell * (place // CELLS)
            edge = cell * rng.uniform(0.5, 0.9)
            box = (left + 0.05 * cell, top + 0.05 * cell, left + edge, top + edge)
            is_circle = rng.random() < 0.6
            num_circles += is_circle
            (draw.ellipse if is_circle else draw.rectangle)(box, fill=rng.choice(COLOURS))
        name = f"pictures/{number:05d}.png"
        picture.save(folder / name)
        content = [{"type": "image", "image": name}, {"type": "text", "text": "How many circles are in the picture? Answer with a number."}]
        rows.append({"messages": [{"role": "user", "content": content}], "label": str(num_circles)})
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
