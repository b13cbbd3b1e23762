"""Environment variables: the one place that reads and sets them, with every name that Molt knows."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES: dict[str, str] = {
    "MOLT_CRASHPOINT": "name of the point at which a test kills the process; only tests set it",
    "MOLT_ENGINE_PID": "process of the engine that this one belongs to, and ends with; engines set it",
    "MOLT_TRACEBACK": "1 shows the traceback of an error that is told in a box otherwise",
    "NO_COLOR": "any value turns colours off",
    "COLUMNS": "width of the terminal in characters",
    "OMP_NUM_THREADS": "threads of one process in torch",
    "CUDA_VISIBLE_DEVICES": "GPUs that a process may see",
    "VLLM_CPU_KVCACHE_SPACE": "GiB of cache of a vLLM engine on the CPU",
    "VLLM_CPU_OMP_THREADS_BIND": "cores that a vLLM engine on the CPU binds its threads to",
    "VLLM_LOGGING_LEVEL": "level of what vLLM prints",
    "VLLM_NO_USAGE_STATS": "1 keeps vLLM from sending usage figures",
    "TORCHDYNAMO_DISABLE": "1 keeps torch from tracing programs",
    "TRITON_F32_DEFAULT": "ieee makes kernels written in Triton multiply float32 without rounding it to TF32",
    "VLLM_BATCH_INVARIANT": "1 takes kernels of vLLM whose result does not depend on the batch",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1 lets vLLM send functions to its workers",
    "RAY_USAGE_STATS_ENABLED": "0 keeps Ray from sending usage figures",
    "RAY_ADDRESS": "Ray cluster to join; a local one is started when absent",
    "HF_HUB_OFFLINE": "1 keeps Hugging Face libraries from looking anything up",
    "TOKENIZERS_PARALLELISM": "threads of Hugging Face tokenizers: true or false",
    "CUBLAS_WORKSPACE_CONFIG": "workspace of cuBLAS; deterministic kernels need :4096:8",
    "CUDNN_HOME": "folder of the cuDNN that Transformer Engine loads; torch's own when absent",
    "AWS_ACCESS_KEY_ID": "key of an object store",
    "AWS_SECRET_ACCESS_KEY": "secret of an object store",
    "AWS_ENDPOINT_URL": "address of an object store",
    "AWS_REGION": "region of an object store",
}
"""Name of each variable that Molt reads, sets or records, and what it means. `read` and `set_default` refuse any other."""

QUIET: dict[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What a process of a run starts with unless the user says otherwise."""


def read(name: str, default: str | None = None) -> str | None:
    """Value of a known variable; default when it is absent or empty."""
    assert name in VARIABLES, f"{name} is not in molt.environ.VARIABLES"
    return os.environ.get(name) or default


def is_set(name: str) -> bool:
    """True when a known variable holds anything but 0, false, no or nothing."""
    return (read(name, "") or "").lower() not in ("", "0", "false", "no")


def set_default(name: str, value: str) -> str:
    """Set a known variable for this process and its children unless it is set; returns the value in force."""
    assert name in VARIABLES, f"{name} is not in molt.environ.VARIABLES"
    return os.environ.setdefault(name, value)


def force(name: str, value: str) -> None:
    """Set a known variable for this process and its children, whatever it held."""
    assert name in VARIABLES, f"{name} is not in molt.environ.VARIABLES"
    os.environ[name] = value


def prepare(defaults: Mapping[str, str] = QUIET) -> None:
    """Set what a process of a run starts with; call it before ray, vllm or transformers is imported."""
    for name, value in defaults.items():
        set_default(name, value)


def child(**extra: str) -> dict[str, str]:
    """The environment of a child process: this one's and what is given."""
    return {**os.environ, **extra}


def recorded() -> dict[str, str]:
    """The known variables that are set, for the log; a name with KEY, SECRET or TOKEN shows only that it is set."""
    hidden = ("KEY", "SECRET", "TOKEN", "PASSWORD")
    return {name: "(set)" if any(word in name for word in hidden) else os.environ[name] for name in VARIABLES if name in os.environ}
