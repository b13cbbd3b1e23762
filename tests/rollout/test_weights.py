"""Weights between trainer and engines: digests, names, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from molt.errors import RefitError, SettingError
from molt.rollout import weights
from molt.rollout.weights import (
    check_names,
    check_shapes,
    digest_tensors,
    draft_names,
    facts_of,
    model_digest,
    named_weights,
    read_tensors,
    read_weights,
    remove_weights,
    tensor_digest,
    tensor_shapes,
    write_weights,
)


def test_facts_of_a_stream_are_those_of_its_tensors_in_its_order() -> None:
    facts = facts_of([("b", torch.ones(3)), ("a", torch.zeros(2, 2, dtype=torch.bfloat16))])
    assert list(facts) == ["b", "a"]
    assert facts["b"].digest == tensor_digest(torch.ones(3)) == digest_tensors({"x": torch.ones(3)})["x"]
    assert (facts["a"].shape, facts["a"].dtype, facts["a"].size_bytes) == ((2, 2), "bfloat16", 8)


def test_a_model_digest_does_not_depend_on_order_and_does_on_names() -> None:
    assert model_digest({"a": "1", "b": "2"}) == model_digest({"b": "2", "a": "1"})
    assert model_digest({"a": "1", "b": "2"}) != model_digest({"a": "2", "b": "1"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_was_written_is_read_with_its_digest(tmp_path: Path, dtype: torch.dtype) -> None:
    sent = {"a": torch.arange(5).to(dtype), "b.c": torch.ones(2, 3).to(dtype).t()}
    source = write_weights(sent, policy_version=7, folder=tmp_path)
    got = dict(read_weights(source))
    assert source.policy_version == 7 and set(got) == set(sent)
    assert all(torch.equal(got[name], sent[name]) and got[name].dtype == dtype for name in sent)
    assert tensor_shapes(str(source.path)) == {"a": (5,), "b.c": (3, 2)}
    remove_weights(source)
    remove_weights(source)
    assert list(tmp_path.iterdir()) == []


def test_changes_that_cancel_in_a_sum_change_the_digest() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    other = one + torch.tensor([0.5, -0.5, 0.0])
    assert float(one.sum()) == float(other.sum()) and tensor_digest(one) != tensor_digest(other)


def test_a_flipped_bit_is_told_by_name(tmp_path: Path) -> None:
    source = write_weights({"first": torch.ones(4), "second": torch.ones(4)}, policy_version=1, folder=tmp_path)
    path = Path(str(source.path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RefitError, match="second"):
        list(read_weights(source))


def test_another_set_of_names_is_refused(tmp_path: Path) -> None:
    source = write_weights({"first": torch.ones(4)}, policy_version=1, folder=tmp_path)
    with pytest.raises(RefitError, match="missing \\['second'\\]"):
        list(read_weights(replace(source, digests={**source.digests, "second": "0"})))


def test_a_folder_without_room_is_a_setting_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 10})()
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda _: full)
    with pytest.raises(SettingError, match="shm-size"):
        write_weights({"a": torch.ones(4)}, policy_version=1, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tied_head_may_be_sent_or_left_out_and_nothing_else_may() -> None:
    check_names(["a", "head"], ["a"], tied=["head"])
    check_names(["a"], ["a", "head"], tied=["head"])
    with pytest.raises(RefitError, match="missing \\['b'\\]"):
        check_names(["a", "b"], ["a"], tied=["head"])
    with pytest.raises(RefitError, match="unexpected \\['b'\\]"):
        check_names(["a"], ["a", "b"], tied=["head"])


def test_a_shape_that_the_engine_lacks_is_told() -> None:
    with pytest.raises(RefitError, match=r"a: shape \(3,\)"):
        check_shapes({"a": (2,)}, {"a": (3,)})


def test_names_are_those_of_the_checkpoint(tiny_dense: Path, tiny_moe: Path) -> None:
    from transformers import AutoModelForCausalLM

    for folder in (tiny_dense, tiny_moe):
        model = AutoModelForCausalLM.from_pretrained(folder)
        stored = tensor_shapes(str(folder))
        assert {name: tuple(tensor.shape) for name, tensor in named_weights(model).items()} == stored


def test_draft_heads_are_known_by_their_names() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.eh_proj.weight",  # DeepSeek and GLM: the layer after the last
        "model.mtp_layers.0.input_proj.weight",  # MiMo
        "mtp.fc.weight",  # Qwen3-Next
        "lm_head.weight",
        "model.vision_model.encoder.layers.2.mlp.fc1.weight",  # SmolVLM: a tower may have more layers than the language model
    ]
    assert draft_names(names, 2) == {"model.layers.2.eh_proj.weight", "model.mtp_layers.0.input_proj.weight", "mtp.fc.weight"}


def test_tensors_can_be_left_out_of_a_file(tmp_path: Path) -> None:
    source = write_weights({"a": torch.ones(2), "mtp.b": torch.ones(3)}, policy_version=1, folder=tmp_path)
    assert [name for name, _ in read_tensors(str(source.path), without=["mtp.b"])] == ["a"]
