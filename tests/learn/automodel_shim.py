"""Lets NeMo AutoModel build models without CUDA: where it asks for the current CUDA device it gets the CPU. For tests only."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch


class _IsDevice(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.device)


class _Device(metaclass=_IsDevice):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return torch.device("cpu") if args and str(args[0]).startswith("cuda") else torch.device(*args, **kwargs)


class _Cuda:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")


class _Torch:
    device = _Device
    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


NEEDY = (
    "nemo_automodel._transformers.auto_model",
    "nemo_automodel._transformers.model_init",
    "nemo_automodel.components.models.qwen3_moe.model",
    "nemo_automodel.components.models.qwen3.model",
)


def install(patch: pytest.MonkeyPatch) -> None:
    """Give the modules that ask for CUDA a torch whose current device is the CPU."""
    import importlib

    for name in NEEDY:
        importlib.import_module(name)
        patch.setattr(sys.modules[name], "torch", _Torch(), raising=False)
