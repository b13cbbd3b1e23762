"""The bill of memory: activations beside what a model keeps, shares of every layout by hand, and clusters that are too small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from molt import memory, places
from molt.cli import app
from molt.config import Config
from molt.fit import Cluster, Fit, fit
from molt.learn import fused_head, logprob, tensor_parallel
from molt.learn.meta import Parameters, count_parameters
from molt.learn.model import load_model
from molt.memory import (
    CHUNK_BYTES,
    CHUNK_FLOATS,
    GIB,
    KEPT_FLOATS,
    head_bytes,
    host_bill,
    image_need,
    kept_per_token,
    loading_gib,
    local_parameters,
)
from molt.model_shape import ModelShape
from molt.rollout import vision
from tests.groups import leave_group
from tests.learn.tiny import make_model, make_moe
from tools.device.images import SMOLVLM_256M

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder that holds a config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(**rooms: dict[str, Any]) -> Config:
    return Config.model_validate(rooms)


def ask(folder: Path, cluster: Cluster, **rooms: dict[str, Any]) -> Fit:
    """The answer for a model folder."""
    return fit(settings(**rooms), cluster, ModelShape.read(folder), count_parameters(folder))


def kept_by_a_layer(folder: Path, dtype: str, num_layers: int = 2, num_tokens: int = 256, tp: DeviceMesh | None = None) -> float:
    """Bytes of a token that autograd keeps in one layer of a model on the CPU; embedding and last norm are a model without layers."""
    found = []
    for layers in (num_layers, 0):
        scorer = load_model(str(folder), settings(actor={"implementation": "hf"}).actor, settings().fsdp)
        lm = scorer.lm.to(getattr(torch, dtype))
        del lm.model.layers[layers:]
        lm.config.num_hidden_layers = layers
        if tp is not None:
            tensor_parallel.apply(lm, tp)
        own = [p.to_local() if isinstance(p, DTensor) else p for p in lm.parameters()]
        weights, kept, tensors = {p.untyped_storage().data_ptr() for p in own}, {}, []

        def keep(
            tensor: torch.Tensor, weights: set[int] = weights, kept: dict[int, int] = kept, tensors: list[Any] = tensors
        ) -> torch.Tensor:
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            tensors.append(tensor)  # so that no memory is used twice
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.arange(num_tokens)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            lm.model(input_ids=ids % 97, position_ids=ids, row_lengths=(num_tokens,), use_cache=False)
        found.append(sum(kept.values()))
    return (found[0] - found[1]) / num_layers / num_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [make_model, make_moe])
def test_activations_are_those_that_a_layer_keeps_and_a_little_more(tmp_path: Path, make: Any, dtype: str) -> None:
    folder = make(tmp_path / "model")
    ratio = kept_per_token(settings(actor={"dtype": dtype}), ModelShape.read(folder)) / kept_by_a_layer(folder, dtype)
    assert 1.0 <= ratio < 1.5  # what is kept of a row of scores, or of an expert's choice, weighs more in a layer of 32 columns


def _part(rank: int, size: int, folder: str, model: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    kept = kept_by_a_layer(Path(model), "bfloat16", tp=init_device_mesh("cpu", (size,)))
    (Path(folder) / f"kept-{rank}").write_text(str(kept))
    leave_group()


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_model, make_moe])
def test_activations_of_a_part_of_a_layer_are_billed(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "model", num_entries=98)
    mp.spawn(_part, (2, str(tmp_path), str(folder)), nprocs=2)
    config = settings(actor={"dtype": "bfloat16"}, fsdp={"num_ranks": 2, "tp_size": 2})
    for rank in range(2):
        ratio = kept_per_token(config, ModelShape.read(folder)) / float((tmp_path / f"kept-{rank}").read_text())
        assert 0.9 < ratio < 1.5  # masks and places of choices weigh more beside 32 columns; of 512 columns 1.04 (experts) and 1.17


def test_chunks_of_the_head_are_those_of_the_log_probs() -> None:
    assert (logprob.CHUNK_FLOATS["cuda"], logprob.KEPT_FLOATS["cuda"], fused_head.CHUNK_BYTES) == (CHUNK_FLOATS, KEPT_FLOATS, CHUNK_BYTES)


def test_head_is_billed_by_the_kernels_that_run(tmp_path: Path) -> None:
    shape = ModelShape.read(write(tmp_path / "model", QWEN3_4B))
    alone = settings(actor={"dtype": "bfloat16"})
    # 2 B x 1,000 x 151,936 = 0.304e9 of logits, below the chunk of 2^30; (4 + 2) B x 151,936 x 2,560 = 2.334e9 of gradient.
    assert head_bytes(alone, shape, 1000) == 2 * 1000 * 151936 + 6 * 151936 * 2560
    assert head_bytes(alone, shape, 8000) == (1 << 30) + 6 * 151936 * 2560
    # Two parts of 75,968 entries: 4 B x 1,000 x 75,968 kept, three such blocks at work, 4 B x 75,968 x 2,560 of gradient.
    two = settings(actor={"dtype": "bfloat16"}, fsdp={"num_ranks": 2, "tp_size": 2})
    assert head_bytes(two, shape, 1000) == 4 * 4 * 1000 * 75968 + 4 * 75968 * 2560


@pytest.mark.parametrize(
    ("implementation", "fsdp", "gib"),
    [
        ("hf", {"num_ranks": 8}, 0.5),  # each rank reads its own part: 4 B x 2^30 / 8
        ("auto", {"num_ranks": 8}, 4.0),  # AutoModel reads all of it: 4 B x 2^30
        ("auto", {"num_ranks": 8, "tp_size": 2}, 0.5),  # the Hugging Face class
        ("automodel", {"num_ranks": 8, "ep_size": 2}, 0.5),  # AutoModel shards first where it spreads experts
    ],
)
def test_weights_are_loaded_by_shard_where_the_class_can(implementation: str, fsdp: dict[str, int], gib: float) -> None:
    parameters = Parameters(total=1 << 30, embedding=0, head=0, experts=0, layer=0, layer_experts=0, uncut=0)
    config = settings(actor={"implementation": implementation}, fsdp=fsdp, vllm={"weight_transfer": "nccl"})
    assert loading_gib(config, parameters) == gib
    assert host_bill(config, parameters, ranks_per_host=8).gib == 0.0


def test_model_that_is_loaded_whole_must_fit_a_card(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", QWEN3_4B | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64})
    rooms: dict[str, Any] = {"actor": {"model_name_or_path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": True}}
    rooms |= {"fsdp": {"num_ranks": 16}, "vllm": {"num_engines": 4, "tensor_parallel_size": 4}}
    for implementation, is_fitting in (("auto", False), ("hf", True)):
        rooms["actor"]["implementation"] = implementation
        found = ask(folder, Cluster(num_gpus=32, gpu_gib=80), **rooms)
        assert any("reads the whole model in float32" in line for line in found.findings) == (not is_fitting)
        assert found.is_fitting == is_fitting


def test_parameters_are_counted_from_a_config_alone(tmp_path: Path) -> None:
    dense, moe = count_parameters(write(tmp_path / "dense", QWEN3_4B)), count_parameters(write(tmp_path / "moe", QWEN3_30B_A3B))
    # Published: 4.0B with a tied embedding of 151936 x 2560, and 30.5B of which 48 layers x 128 experts x 3 x 768 x 2048 are experts.
    assert round(dense.total / 1e9, 2) == 4.02 and dense.embedding == 151936 * 2560 and dense.head == 0 and dense.experts == 0
    assert round(moe.total / 1e9, 1) == 30.5 and moe.experts == 48 * 128 * 3 * 768 * 2048 and moe.head == 151936 * 2048


def test_tower_and_connector_count_as_parameters(tmp_path: Path) -> None:
    found = count_parameters(write(tmp_path / "smolvlm", SMOLVLM_256M))
    # Published: 256,484,928. Text 30 layers of 3,540,096, embedding and head of 49280 x 576; tower 86.4M; connector 16 x 768 x 576.
    assert found.total == 256_484_928 and found.embedding == found.head == 49280 * 576
    assert found.layer == 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576


def test_images_are_billed_by_what_the_tower_does(tmp_path: Path) -> None:
    folder = write(tmp_path / "smolvlm", SMOLVLM_256M)
    eyes, shape = count_parameters(folder).eyes, ModelShape.read(folder)
    assert eyes is not None and (eyes.patches, eyes.features, eyes.pixels) == (1024, 64, 3 * 512 * 512)
    # 1280 tokens are at most 20 tiles; float32: 20 x (3 MiB of pixels + 64 x 576 x 4), a layer 20 x 1024 x 4 x (8 x 768 + 2 x 3072)
    fixed, layer = 20 * (4 * 3 * 512 * 512 + 4 * 64 * 576), 20 * 1024 * 4 * (8 * 768 + 2 * 3072)
    for actor, moving in (
        ({}, layer),
        ({"freeze_vision": False}, 12 * layer),
        ({"freeze_vision": False, "gradient_checkpointing": True}, layer + 20 * 1024 * 12 * 768 * 4),
    ):
        config = settings(actor=actor, train={"micro_batch_tokens": 1280}, data={"max_len": 1024})
        assert image_need(config, eyes, shape).gib == pytest.approx((fixed + moving) / GIB)
    assert memory.TILES_AT_ONCE == vision.TILES_AT_ONCE


def test_shares_of_the_weights_by_layout() -> None:
    parameters = Parameters(total=1000, embedding=0, head=0, experts=600, layer=0, layer_experts=0, uncut=40)
    # fsdp alone: 1000 / 4. Two replicas: 1000 / 2. tp2: (960 / 2 + 40) / 2. ep2: 400 / 4 + 600 / 4.
    for fsdp, share in (({}, 250), ({"replicas": 2}, 500), ({"tp_size": 2}, 260), ({"cp_size": 2}, 250), ({"ep_size": 2}, 250)):
        assert local_parameters(settings(fsdp={"num_ranks": 4, **fsdp}), parameters) == share


def test_run_that_fits_and_the_same_on_cards_that_are_too_small(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", QWEN3_4B)
    rooms: dict[str, Any] = {
        "actor": {"model_name_or_path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": True},
        "fsdp": {"num_ranks": 4},
        "vllm": {"num_engines": 4},
    }
    large = ask(folder, Cluster(num_gpus=8, gpu_gib=80), **rooms)
    assert large.findings == () and large.layout is not None and not large.layout.is_colocated
    # 16 bytes for each of 4.02e9 / 4 parameters are 15 GiB: weights, gradient, two moments.
    assert sum(need.gib for need in large.trainer.needs[:3]) == pytest.approx(16 * 4.022e9 / 4 / GIB, rel=1e-3)
    # The update brings 7.5 GiB of moments when the pass is over, which took more: they add nothing. Where checkpointed passes of 512
    # tokens take less, they add what is missing.
    rooms["fsdp"]["offload"] = "optimizer"
    for tokens in (16384, 512):
        answer = ask(folder, Cluster(num_gpus=8, gpu_gib=80), **rooms, train={"micro_batch_tokens": tokens})
        bill = {need.what: need.gib for need in answer.trainer.needs}
        missing = 8 * 4.022e9 / 4 / GIB - bill["whole layers"] - bill["activations"] - bill["head"]
        assert bill["moments"] == pytest.approx(max(0.0, missing), abs=0.01) and (missing > 0) == (tokens == 512)
    rooms["fsdp"].pop("offload")
    # Held whole: 2 bytes of every parameter in place of two layers, the embeddings and a third layer, and 4 of every gradient.
    held = ask(
        folder,
        Cluster(num_gpus=8, gpu_gib=80),
        **rooms | {"fsdp": {"num_ranks": 4, "reshard_after_forward": False, "defer_grad_sync": True}},
    )
    whole = {bill.what: bill.gib for bill in held.trainer.needs}["whole layers"]
    assert whole == pytest.approx(6 * 4.022e9 / GIB, rel=0.02)
    small = ask(folder, Cluster(num_gpus=8, gpu_gib=16), **rooms)
    assert any(line.startswith("trainer: ") and "too much for 16 GiB" in line for line in small.findings)
    assert "lower train.micro_batch_tokens, set fsdp.offload=optimizer, or take more ranks" in small.findings[0]  # checkpointed already
    few = ask(folder, Cluster(num_gpus=2, gpu_gib=80), **rooms)
    assert any("fsdp.num_ranks=4 needs as many GPUs, there are 2" in line for line in few.findings)


def test_plan_says_what_does_not_fit_and_leaves_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "model", QWEN3_30B_A3B)
    words = ["plan", "--actor.model_name_or_path", str(folder), "--actor.dtype", "bfloat16", "--fsdp.num_ranks", "8", "--fsdp.ep_size"]
    assert app.run([*words, "7", "--gpus", "16", "--gpu-memory-gib", "141", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and any("fsdp.ep_size=7 does not divide the model's 128 experts" in line for line in told["findings"])
    engines = ["--vllm.num_engines", "4", "--vllm.tensor_parallel_size", "2", "--actor.gradient_checkpointing"]
    assert app.run([*words, "8", *engines, "--gpus", "16", "--gpu-memory-gib", "141"]) == 0
    captured = capsys.readouterr()
    assert "activations" in captured.out and "it fits" in captured.err


@pytest.mark.parametrize(
    ("recipe", "shape", "num_gpus", "sizes"),
    [
        ("qwen3_4b", QWEN3_4B, 8, ("80", "40")),
        ("qwen3_30b_a3b", QWEN3_30B_A3B, 16, ("80", "40")),
        ("smolvlm_shapes", SMOLVLM_256M, 1, ("24", "12")),
    ],
)
def test_recipe_fits_the_hosts_that_its_head_names_and_no_smaller_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, shape: dict[str, Any], num_gpus: int, sizes: tuple[str, str]
) -> None:
    folder = write(tmp_path / recipe, shape)
    words = ["plan", "--config", str(places.folder("recipes") / f"{recipe}.toml"), "--actor.model_name_or_path", str(folder), "--json"]
    cluster = ["--gpus", str(num_gpus), "--host-memory-gib", "1000", "--gpu-memory-gib"]
    assert [app.run([*words, *cluster, size]) for size in sizes] == [0, 1]
    capsys.readouterr()
