"""Weights read by shard: every bit as from_pretrained gives it, tied or not, with experts, from several files; what lacks is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from molt.config import ActorSettings, FsdpSettings
from molt.errors import SettingError
from molt.learn.beside import Critic
from molt.learn.mesh import make_mesh
from molt.learn.model import TokenScorer, load_model
from molt.learn.policy import shard
from molt.learn.streamed import weight_files
from tests.learn.tiny import make_config, make_model, make_moe


def read(folder: Path, **actor: Any) -> TokenScorer:
    """The model of a folder, sharded over the one rank of this process; its weights were read by shard."""
    settings, fsdp = ActorSettings(**actor), FsdpSettings()
    scorer = load_model(str(folder), settings, fsdp, is_deferred=True)
    assert scorer.source == folder and next(scorer.parameters()).is_meta
    shard(scorer, settings, fsdp, make_mesh(fsdp, "cpu"))
    assert scorer.source is None
    return scorer


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def check_equal(scorer: TokenScorer, folder: Path) -> None:
    """The same names, bits, buffers, ties and config as a model that was loaded whole."""
    expected: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights, found = dict(expected.named_parameters()), dict(scorer.lm.named_parameters())
    assert weights.keys() == found.keys()
    assert all(found[name].dtype == torch.float32 and torch.equal(whole(found[name]), weights[name]) for name in weights)
    buffers = dict(scorer.lm.named_buffers())
    assert len(buffers) > 0 and all(torch.equal(buffers[name], tensor) for name, tensor in expected.named_buffers())
    assert scorer.lm.config.to_dict() == expected.config.to_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_every_bit_is_that_of_the_model_loaded_whole(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    made = make_moe(tmp_path / "made") if kind == "experts" else make_model(tmp_path / "made", tied=kind == "tied")
    folder = tmp_path / "model"  # in several files, with an index
    AutoModelForCausalLM.from_pretrained(made, dtype=dtype).save_pretrained(folder, max_shard_size="30KB")
    assert len(weight_files(folder)) > 1
    scorer = read(folder)
    check_equal(scorer, folder)
    assert (scorer.lm.lm_head.weight is scorer.lm.model.embed_tokens.weight) == (kind == "tied")
    places = [parameter.to_local().data_ptr() for parameter in scorer.parameters()]
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    # A view of the file would change with it.
    assert not any(int(low, 16) <= place < int(high, 16) for low, high in mapped for place in places)


def test_scaled_rotation_is_made_again(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    check_equal(read(folder), folder)


def test_frozen_router_and_dropout_are_as_asked(tmp_path: Path) -> None:
    scorer = read(make_moe(tmp_path / "model"), freeze_moe_router=True)
    frozen = {name for name, parameter in scorer.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"lm.model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}
    assert all(module.p == 0.0 for module in scorer.modules() if isinstance(module, nn.Dropout))


def test_critic_leaves_the_output_head_in_its_file(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = make_model(tmp_path / f"model-{tied}", tied=tied)
        critic = Critic(make_config(folder), make_mesh(FsdpSettings(), "cpu"), actor_path=str(folder), num_steps=1)
        weights = load_file(folder / "model.safetensors")
        embedding = critic.policy.full_tensors()["scorer.lm.model.embed_tokens.weight"]
        assert torch.equal(embedding, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(("fault", "why"), [("missing", "is in none of its files"), ("shape", "has another shape than the model")])
def test_weight_that_is_missing_or_has_another_shape_is_refused_by_name(tmp_path: Path, fault: str, why: str) -> None:
    folder = make_model(tmp_path / "model")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    taken = weights.pop(name)
    if fault == "shape":
        weights[name] = taken[:16].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match=rf"layers\.1\.self_attn\.q_proj\.weight {why} \(1 such weights\)"):
        read(folder)


def test_tied_weights_that_a_file_holds_apart_are_loaded_whole(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    scorer = load_model(str(folder), ActorSettings(), FsdpSettings(), is_deferred=True)
    assert scorer.source is None and not next(scorer.parameters()).is_meta
