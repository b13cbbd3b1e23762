"""Tiny random models in folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from molt.data.processor import ImageProcessor


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with tied head: 2 layers, hidden 64, vocabulary 300, 512 positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny-dense")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SmolVLM (Idefics3): 2 layers of text and of vision, two tiles along an image and its overview."""
    from molt.data.tiny_vision import make_vision_model

    folder = tmp_path_factory.mktemp("tiny-vision")
    make_vision_model(folder, num_tiles=2, spread=0.2)
    return folder


@pytest.fixture(scope="session")
def tiny_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaVA: a CLIP tower of three layers, the last of which is not looked at."""
    from molt.data.tiny_vision import make_llava_model

    folder = tmp_path_factory.mktemp("tiny-llava")
    make_llava_model(folder, spread=0.2)
    return folder


@pytest.fixture
def processor(request: pytest.FixtureRequest) -> ImageProcessor:
    """The processor of the model that the test's class names."""
    processor = ImageProcessor.load(request.getfixturevalue(request.cls.model))
    assert processor is not None
    return processor


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE: 2 layers, 8 experts, 2 for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny-moe")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random MiMo: 2 layers, hidden 128, vocabulary 300, and a draft head that guesses about 3 of 4 tokens right."""
    from tools.device.models import make_mtp_model

    folder = tmp_path_factory.mktemp("tiny-mtp")
    return make_mtp_model(folder, hidden_size=128, num_layers=2, vocab_size=300, dtype="float32")
