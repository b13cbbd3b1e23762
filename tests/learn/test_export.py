"""Export: a folder that loads elsewhere with the same logits, in the dtype that its config declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from molt.learn.export import export, with_dtype
from molt.learn.weights import Publisher, sent_digest, sent_tensors
from molt.rollout.weights import digest_tensors, model_digest
from tests.learn.tiny import make_config, make_model, make_plan, make_rank, make_rows


@pytest.mark.parametrize("tied", [True, False])
def test_export_reloads_with_equal_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source = make_model(tmp_path / "source", tied=tied)
    rows = make_rows(4)
    rank = make_rank(make_config(source), rows)
    rank.train(make_plan(rows))
    tensors = sent_tensors(rank.policy)
    folder = export(tensors, rank.policy.scorer.lm.config.to_dict(), source=source, target=tmp_path / "out", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.float32
    ids = torch.tensor([[1, 2, 3, 4]])
    fresh = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    fresh.load_state_dict(tensors, strict=False)
    fresh.tie_weights()
    assert torch.equal(loaded(ids).logits, fresh(ids).logits)
    assert ("lm_head.weight" in tensors) is not tied  # a tied head is stored once
    assert model_digest(digest_tensors(tensors)) == sent_digest(rank.policy)


def test_export_in_bfloat16_declares_it_at_every_level(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    beside = ("tekken.json", "spiece.model", "merges.txt", "chat_template.jinja", "video_preprocessor_config.json", "processor_config.json")
    for name in (*beside, "training_args.bin"):
        (source / name).write_text("{}")
    rank = make_rank(make_config(source), make_rows(2))
    folder = export(
        sent_tensors(rank.policy), rank.policy.scorer.lm.config.to_dict(), source=source, target=tmp_path / "out", dtype=torch.bfloat16
    )
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {file.name for file in folder.iterdir()} == {
        *beside,
        "config.json",
        "generation_config.json",
        "model.safetensors",
        ".molt-export",
    }
    with safe_open(next(folder.glob("*.safetensors")), "pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118 - not a dict


def test_nested_configs_get_the_dtype_too() -> None:
    config = {"dtype": "float32", "text_config": {"dtype": "float32", "torch_dtype": "float32"}, "vision_config": {}}
    assert with_dtype(config, torch.bfloat16) == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"dtype": "bfloat16"},
    }


def test_published_digests_are_those_of_the_file_at_every_revision(tmp_path: Path) -> None:
    rows = make_rows(4)
    rank = make_rank(make_config(make_model(tmp_path / "source")), rows)
    publisher = Publisher(rank.policy, "file")
    for version in range(2):
        result = rank.train(make_plan(rows, step=version))
        known = rank.policy.facts
        source = publisher.publish(version, tmp_path / "shm", [])
        assert rank.policy.facts is known  # the step's digests are those that engines compare: weights are hashed once
        assert source is not None and source.digests == digest_tensors(load_file(source.path or ""))
        assert model_digest(source.digests) == result.weights_digest
