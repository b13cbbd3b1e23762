"""What vLLM is told: engine arguments and environment, from the settings, for CUDA and for the CPU build.

Nothing here imports vllm, so the driver can describe an engine that another process makes.
"""

from __future__ import annotations

import math
from typing import Any

from molt.config import Config
from molt.errors import SettingError
from molt.model_shape import takes_images

CPU_BLOCK_SIZE = 32
EXTENSION = "molt.rollout.vllm_worker.RefitExtension"


def has_cuda() -> bool:
    """Whether engines go onto NVIDIA GPUs."""
    import torch

    return torch.cuda.is_available()


def vllm_options(config: Config, *, is_cuda: bool | None = None) -> dict[str, Any]:
    """Arguments of VllmEngine beside name, model, length, dtype and version."""
    settings = config.vllm
    is_cuda = has_cuda() if is_cuda is None else is_cuda
    if not is_cuda and settings.sleep_level:
        raise SettingError(f"vllm.sleep_level={settings.sleep_level} frees GPU memory and there is no GPU; set it to 0")
    if not is_cuda and settings.seed_calls and settings.enable_chunked_prefill:
        raise SettingError(
            "vllm.seed_calls=true ends an engine on the CPU when it prefills a prompt in chunks (a generator there cannot be set back); "
            "set it to false, or vllm.enable_chunked_prefill=false"
        )
    if not is_cuda and settings.weight_transfer != "file":
        raise SettingError(f"vllm.weight_transfer={settings.weight_transfer} goes from GPU to GPU and there is no GPU; set it to file")
    return {
        "is_cuda": is_cuda,
        "transport": settings.weight_transfer,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_num_seqs": settings.max_num_seqs,
        "seeds_calls": settings.seed_calls,
        "enforce_eager": settings.enforce_eager or not is_cuda,
        "is_compiled": settings.compile,
        "kv_cache_space_gib": settings.kv_cache_space_gib,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "enable_sleep": settings.sleep_level > 0,
        "capture_routes": config.train.routing_replay,
        "kv_on_refit": settings.kv_on_refit,
        "max_images": config.data.max_images if takes_images(config.actor.model_name_or_path or "") else 0,
        "is_vision_frozen": config.actor.freeze_vision,
    }


def vllm_environment(config: Config, *, is_cuda: bool | None = None) -> dict[str, str]:
    """Environment of the process that imports vllm, to be set before it does."""
    is_cuda = has_cuda() if is_cuda is None else is_cuda
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    if is_cuda:
        # CUDA handles of a weight transfer travel to vLLM's workers inside its own serialization.
        common["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if (config.actor.dtype if config.vllm.dtype == "auto" else config.vllm.dtype) == "float32":
            common["TRITON_F32_DEFAULT"] = "ieee"  # Triton's own default rounds products to TF32, which the trainer does not
        return common
    return {
        **common,
        "TORCHDYNAMO_DISABLE": "1",  # tracing would take a minute at the first request and is of no use without a compiler
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(config.vllm.kv_cache_space_gib or 1)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def vllm_num_gpus(config: Config, *, is_cuda: bool | None = None) -> int:
    """GPUs that one engine takes."""
    is_cuda = has_cuda() if is_cuda is None else is_cuda
    return config.vllm.tensor_parallel_size * config.vllm.data_parallel_size if is_cuda else 0


def engine_arguments(
    model_path: str,
    *,
    max_len: int,
    dtype: str,
    is_cuda: bool,
    transport: str,
    tensor_parallel_size: int,
    data_parallel_size: int,
    enable_expert_parallel: bool,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    seed: int,
    enforce_eager: bool,
    is_compiled: bool,
    kv_cache_space_gib: float | None,
    enable_prefix_caching: bool,
    enable_chunked_prefill: bool,
    num_speculative_tokens: int,
    enable_sleep: bool,
    capture_routes: bool,
    quantization: str | None = None,
    max_images: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "max_model_len": max_len,
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "enable_expert_parallel": enable_expert_parallel,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": enforce_eager,
        "enable_prefix_caching": enable_prefix_caching,
        "enable_chunked_prefill": enable_chunked_prefill,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # vLLM's default is raw, which is not what was sampled from
        "max_logprobs": 1,
        "generation_config": "vllm",  # a model folder's generation_config.json must not change the distribution
        "trust_remote_code": False,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        "seed": seed,
    }
    if is_cuda:
        arguments |= {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": enable_sleep}
        arguments |= _further_on_cuda(is_compiled or enforce_eager, kv_cache_space_gib, tensor_parallel_size)
        if capture_routes:
            arguments["enable_return_routed_experts"] = True
        if transport != "file":
            arguments["weight_transfer_config"] = {"backend": transport}
    else:
        arguments["block_size"] = CPU_BLOCK_SIZE
        if capture_routes:
            # Routes are taken by hooks here; a prefix that is not run again would leave holes.
            arguments["enable_prefix_caching"] = False
    if max_images:
        arguments["limit_mm_per_prompt"] = {"image": max_images}
        arguments["skip_tokenizer_init"] = False  # the model's processor makes markers of text
    if quantization is not None:
        if not is_cuda:
            raise SettingError(f"quantization={quantization} needs an NVIDIA GPU, there is none; leave it out")
        arguments["quantization"] = quantization
    if num_speculative_tokens:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
    return arguments


def _further_on_cuda(is_compiled: bool, kv_cache_space_gib: float | None, tensor_parallel_size: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if kv_cache_space_gib is not None:
        # Given in bytes, vLLM measures nothing at its start: what other processes on the GPU take meanwhile does not count as its own.
        arguments["kv_cache_memory_bytes"] = int(kv_cache_space_gib * 2**30)
    if not is_compiled:
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if tensor_parallel_size > 1:
        # vLLM would choose Ray inside an actor, and find no seats for its own workers there.
        arguments["distributed_executor_backend"] = "mp"
    return arguments
