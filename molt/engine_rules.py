"""Rules of the engines beside the trainer: which way weights can go, and when an engine may sleep."""

from __future__ import annotations

from collections.abc import Iterator

from molt.config import Config

ONLY_COLOCATED = "vllm.weight_transfer=ipc hands over memory of a GPU that trainer and engine share"
ONLY_APART = "vllm.weight_transfer=nccl is a broadcast between GPUs, which NCCL refuses to two processes on one"


def engine_findings(config: Config) -> Iterator[str]:
    """What of the engines cannot be, known from the settings alone. The embedded engine's idle settings are named elsewhere."""
    vllm, placement = config.vllm, config.placement.trainer
    if vllm.engine == "embedded" and vllm.weight_transfer != "file":
        yield f"vllm.weight_transfer={vllm.weight_transfer} needs vllm.engine=vllm, got embedded; set it to file"
    elif placement != "auto":
        yield from placed_findings(config, is_colocated=placement == "colocated")
    if vllm.enable_expert_parallel and vllm.engine != "embedded" and vllm.tensor_parallel_size * vllm.data_parallel_size == 1:
        yield "vllm.enable_expert_parallel=true does nothing with engines of one GPU; raise vllm.tensor_parallel_size or drop it"
    if vllm.sleep_level and vllm.engine != "embedded":
        yield from _sleep(config)


def placed_findings(config: Config, *, is_colocated: bool) -> Iterator[str]:
    """What contradicts the place of the trainer, once that is known."""
    vllm = config.vllm
    if vllm.weight_transfer == "ipc" and not is_colocated:
        yield f"{ONLY_COLOCATED}, got placement.trainer=apart; set vllm.weight_transfer=nccl or file"
    if vllm.weight_transfer == "nccl" and is_colocated:
        yield f"{ONLY_APART}, got placement.trainer=colocated; set vllm.weight_transfer=ipc or file"
    if vllm.sleep_level and not is_colocated:
        yield f"vllm.sleep_level={vllm.sleep_level} frees memory that the trainer needs, got placement.trainer=apart; set it to 0"


def _sleep(config: Config) -> Iterator[str]:
    """Calls in flight sleep with their engine and keep their tokens; their cache is gone, and no refit may wait for their end."""
    level = config.vllm.sleep_level
    if config.max_lag > 0 and not config.train.partial_rollout_enable:
        yield (
            f"vllm.sleep_level={level} holds calls in flight while the trainer steps, and the refit after it would wait for their end; "
            f"set train.partial_rollout_enable, or let nothing run ahead: train.async_queue_size={config.train.async_queue_size} and "
            "admission.max_lag to 0"
        )
    if config.vllm.kv_on_refit == "keep":
        yield f"vllm.sleep_level={level} drops the cache that vllm.kv_on_refit=keep would keep; set one of them to its default"
