"""Engine specs from settings, and what crosses to another process."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from molt import environ
from molt.config import Config
from molt.data.prompts import Prompt
from molt.errors import SettingError
from molt.rollout.engine import FinishReason, Generation, Sampling, WeightSource
from molt.rollout.spec import engine_specs
from molt.rollout.tasks import FailureReason, GroupTask, RefitTimes, RolloutDone, RolloutFailed
from molt.rollout.vllm_calls import Call, sampling_params
from molt.rollout.vllm_settings import engine_arguments, vllm_environment, vllm_num_gpus, vllm_options


def config(**rooms: dict[str, object]) -> Config:
    return Config.model_validate({"actor": {"model_name_or_path": "/models/a"}, **rooms})


def test_one_spec_for_each_engine() -> None:
    specs = engine_specs(config(vllm={"engine": "embedded", "num_engines": 3}, data={"max_len": 99}))
    assert [spec.name for spec in specs] == ["embedded-0", "embedded-1", "embedded-2"]
    assert {(spec.kind, spec.model_path, spec.max_len, spec.dtype) for spec in specs} == {("embedded", "/models/a", 99, "float32")}


def test_the_embedded_engine_refuses_tensor_parallelism() -> None:
    with pytest.raises(SettingError, match="tensor_parallel_size=2"):
        engine_specs(config(vllm={"engine": "embedded", "tensor_parallel_size": 2}))


def test_engines_of_a_run_draw_other_numbers_and_the_same_ones_again() -> None:
    def seeds(seed: int) -> list[int]:
        return [spec.seed for spec in engine_specs(config(vllm={"num_engines": 3}, run={"seed": seed}))]

    assert len({*seeds(0), *seeds(1)}) == 6 and seeds(0) == seeds(0) and max(seeds(0)) < 2**32
    assert arguments(is_cuda=True)["seed"] == 7


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_call_has_a_generator_of_its_own_only_where_that_is_asked(is_seeded: bool) -> None:
    call = Call(request_id="a", vllm_id="a", prompt_ids=[1], sampling=Sampling(max_new_tokens=3, seed=11))
    assert sampling_params(call, 100, is_delta=False, is_seeded=is_seeded).seed == (11 if is_seeded else None)
    assert vllm_options(config(vllm={"seed_calls": is_seeded}), is_cuda=True)["seeds_calls"] is is_seeded


def test_seeded_calls_on_the_cpu_need_whole_prefills() -> None:
    with pytest.raises(SettingError, match=r"vllm\.seed_calls=true ends an engine on the CPU"):
        vllm_options(config(vllm={"seed_calls": True}), is_cuda=False)
    assert vllm_options(config(vllm={"seed_calls": True, "enable_chunked_prefill": False}), is_cuda=False)["seeds_calls"] is True


def test_engines_without_a_model_are_refused() -> None:
    with pytest.raises(SettingError, match="model_name_or_path"):
        engine_specs(Config())


def arguments(*, is_cuda: bool, quantization: str | None = None, **rooms: dict[str, object]) -> dict[str, object]:
    options = vllm_options(config(**rooms), is_cuda=is_cuda)
    for own in ("kv_on_refit", "is_vision_frozen", "seeds_calls"):
        options.pop(own)
    return engine_arguments("/models/a", max_len=128, dtype="bfloat16", seed=7, quantization=quantization, **options)


@pytest.mark.parametrize("is_cuda", [False, True])
def test_vllm_is_told_the_whole_distribution(is_cuda: bool) -> None:
    told = arguments(is_cuda=is_cuda)
    assert told["logprobs_mode"] == "processed_logprobs" and told["generation_config"] == "vllm"
    assert told["skip_tokenizer_init"] is True and told["trust_remote_code"] is False


def test_settings_of_a_gpu_engine_reach_vllm() -> None:
    vllm = {
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 17,
        "enable_prefix_caching": False,
        "num_speculative_tokens": 3,
        "sleep_level": 1,
        "weight_transfer": "nccl",
    }
    told = arguments(is_cuda=True, vllm=vllm, train={"routing_replay": True})
    assert told["tensor_parallel_size"] == 2 and told["data_parallel_size"] == 4
    assert told["gpu_memory_utilization"] == 0.5 and told["max_num_seqs"] == 17
    assert told["enable_prefix_caching"] is False and told["enforce_eager"] is False
    assert told["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert told["enable_sleep_mode"] is True and told["enable_return_routed_experts"] is True
    assert told["weight_transfer_config"] == {"backend": "nccl"}
    assert vllm_num_gpus(config(vllm=vllm), is_cuda=True) == 8


def test_the_cpu_build_gets_its_environment() -> None:
    told = vllm_environment(config(vllm={"kv_cache_space_gib": 1.2}), is_cuda=False)
    assert told["TORCHDYNAMO_DISABLE"] == "1" and told["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in told


@pytest.mark.parametrize(("key", "value"), [("sleep_level", 1), ("weight_transfer", "ipc")])
def test_what_needs_a_gpu_is_refused_without_one(key: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{key}={value}"):
        vllm_options(config(vllm={key: value}), is_cuda=False)


def test_quantization_needs_a_gpu_and_reaches_vllm_there() -> None:
    assert arguments(is_cuda=True, quantization="fp8")["quantization"] == "fp8"
    with pytest.raises(SettingError, match="quantization=fp8 needs an NVIDIA GPU"):
        arguments(is_cuda=False, quantization="fp8")


def test_what_crosses_processes_pickles() -> None:
    prompt = Prompt(prompt_id="x", prompt_index=0, messages=({"role": "user", "content": "hi"},))
    group = GroupTask(group_id="e0-p0", epoch=0, order_index=0, prompt=prompt, group_size=2, members=(0, 1))
    done = RolloutDone(
        rollout_id="e0-p0/0/0", group_id="e0-p0", member=0, engine="vllm-0", num_segments=1, num_turns=1, n_tokens=9, n_sampled=4,
        reward=0.5, version_min=3, is_truncated=False, duration_s=1.0,
    )  # fmt: skip
    failed = RolloutFailed(
        rollout_id="e0-p0/1/0",
        group_id="e0-p0",
        member=1,
        engine="vllm-0",
        reason=FailureReason.ENGINE_ERROR,
        error="x",
        n_sampled=3,
        num_tries=1,
    )
    times = RefitTimes(
        policy_version=1, weights_digest="a", engines={"vllm-0": "a"}, pause_s=0.1, transfer_s=0.1, verify_s=0.1, resume_s=0.1,
        size_bytes=1, num_in_flight=2,
    )  # fmt: skip
    source = WeightSource(policy_version=1, transport="file", path="/dev/shm/x", digests={"a": "b"})
    sampling = Sampling(max_new_tokens=3, stop_token_ids=(1, 2))
    for thing in (group, done, failed, times, source, sampling):
        assert pickle.loads(pickle.dumps(thing)) == thing
    ids = np.array([1, 2], np.int32)
    generation = Generation(
        token_ids=ids, logprobs=np.array([-1.0, -2.0], np.float32), policy_versions=ids, kv_versions=ids, finish_reason=FinishReason.STOP
    )
    assert np.array_equal(pickle.loads(pickle.dumps(generation)).token_ids, ids)


def test_float32_engine_on_a_gpu_multiplies_in_float32() -> None:
    assert vllm_environment(config(), is_cuda=True)["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in vllm_environment(config(actor={"model_name_or_path": "m", "dtype": "bfloat16"}), is_cuda=True)
    assert "TRITON_F32_DEFAULT" not in vllm_environment(config(vllm={"dtype": "bfloat16"}), is_cuda=True)


@pytest.mark.parametrize("is_cuda", [False, True])
def test_variables_of_engines_are_known_ones(is_cuda: bool) -> None:
    for dtype in ("float32", "bfloat16"):
        told = vllm_environment(config(actor={"model_name_or_path": "/models/a", "dtype": dtype}), is_cuda=is_cuda)
        assert set(told) <= set(environ.VARIABLES)
