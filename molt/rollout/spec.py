"""Which engine a run gets: everything that another process needs to make it, from the settings."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from molt.config import Config
from molt.errors import SettingError
from molt.placement import Seat
from molt.rollout.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine, described; it pickles."""

    name: str
    kind: str
    """vllm or embedded."""
    model_path: str
    dtype: str
    max_len: int
    policy_version: int = 0
    seed: int = 0
    request_timeout_s: float = 300.0
    start_timeout_s: float = 600.0
    refit_timeout_s: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's class."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the engine's process."""
    num_gpus: float = 0
    """GPUs that it takes when it has no seat."""
    seat: Seat | None = None
    """Its place on the GPUs of the run."""


def engine_kind(config: Config) -> str:
    """vllm or embedded, auto resolved by what is installed."""
    if config.vllm.engine != "auto":
        return config.vllm.engine
    return "vllm" if importlib.util.find_spec("vllm") is not None else "embedded"


def engine_specs(config: Config, *, model_path: str | None = None, policy_version: int = 0, seats: Sequence[Seat] = ()) -> list[EngineSpec]:
    """One spec for each of vllm.num_engines engines. seats: one for each, where the run has GPUs."""
    path = model_path or config.actor.model_name_or_path
    if path is None:
        raise SettingError("actor.model_name_or_path is not set, engines need a model; give a folder with a Hugging Face model")
    kind = engine_kind(config)
    settings = config.vllm
    dtype = config.actor.dtype if settings.dtype == "auto" else settings.dtype
    if kind == "embedded":
        if settings.tensor_parallel_size * settings.data_parallel_size > 1:
            raise SettingError(
                f"vllm.tensor_parallel_size={settings.tensor_parallel_size}, vllm.data_parallel_size={settings.data_parallel_size} "
                "need vllm.engine=vllm; install it, or set both to 1"
            )
        if settings.weight_transfer != "file":
            raise SettingError(f"vllm.weight_transfer={settings.weight_transfer} needs vllm.engine=vllm; install it, or set it to file")
        options: dict[str, Any] = {"max_num_seqs": settings.max_num_seqs, "kv_on_refit": settings.kv_on_refit}
        env, num_gpus = {"OMP_NUM_THREADS": "1"}, 0
    else:
        from molt.rollout.vllm_settings import vllm_environment, vllm_num_gpus, vllm_options

        options, env, num_gpus = vllm_options(config), vllm_environment(config), vllm_num_gpus(config)
    return [
        EngineSpec(
            name=f"{kind}-{index}",
            kind=kind,
            model_path=path,
            dtype=dtype,
            max_len=config.data.max_len,
            policy_version=policy_version,
            seed=engine_seed(config.run.seed, index),
            request_timeout_s=settings.request_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            refit_timeout_s=settings.refit_timeout_s,
            options=options,
            env=env,
            num_gpus=num_gpus,
            seat=seats[index] if seats else None,
        )
        for index in range(settings.num_engines)
    ]


def engine_seed(seed: int, index: int) -> int:
    """32 bits for one engine of a run: two engines that draw the same numbers would give members of a group the same answers."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/engine {index}".encode(), digest_size=4).digest())


def make_engine(spec: EngineSpec) -> Engine:
    """The engine itself, in this process, not started."""
    common: dict[str, Any] = {"name": spec.name, "max_len": spec.max_len, "dtype": spec.dtype, "policy_version": spec.policy_version}
    if spec.kind == "embedded":
        from molt.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine(spec.model_path, **common, **spec.options)
    if spec.kind == "vllm":
        from molt.rollout.vllm_engine import VllmEngine

        return VllmEngine(spec.model_path, **common, seed=spec.seed, **spec.options)
    raise SettingError(f"vllm.engine={spec.kind}, known are vllm and embedded")
