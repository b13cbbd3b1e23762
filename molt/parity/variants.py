"""What parity is asked for: dense models, mixtures of experts without and with routing replay, fp8 engines, each with its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from molt.errors import SettingError


class Variant(StrEnum):
    """One comparison."""

    DENSE = "dense"
    MOE = "moe"
    """A mixture of experts, each side with its own routes."""
    MOE_R3 = "moe+r3"
    """The same tokens with the engine's routes replayed in the trainer."""
    FP8 = "fp8"
    """An engine that quantizes the weights to fp8 as it loads them; the trainer as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a variant must hold."""

    mean_gap: float
    """Mean |trainer - engine| per token, nats."""
    agreement: float | None = None
    """Least share of agreeing experts in any layer; None where it is not judged."""


LIMITS: dict[str, dict[Variant, float]] = {
    "float32": {Variant.DENSE: 1e-4, Variant.MOE: 1e-3, Variant.MOE_R3: 1e-4, Variant.FP8: 0.2},
    "bfloat16": {Variant.DENSE: 0.06, Variant.MOE: 0.1, Variant.MOE_R3: 0.06, Variant.FP8: 0.2},
}
"""Mean gaps by actor.dtype: above what kernels and their order of summation make. In bfloat16 SmolLM2-135M has 0.042, and a random
mixture of experts 0.18 without and 0.052 with replay (docs/evidence/automodel.json, moe-parity.json)."""


def choose(asked: Sequence[str], *, is_moe: bool, is_cuda: bool, engine: str) -> list[Variant]:
    """The variants to compare: those asked for, or what the model is. SettingError for one that cannot be."""
    if not asked:
        return [Variant.MOE, Variant.MOE_R3] if is_moe else [Variant.DENSE]
    known = [variant.value for variant in Variant]
    for name in asked:
        if name not in known:
            raise SettingError(f"--variants {name}, known are {', '.join(known)}; take some of these")
    chosen = [Variant(name) for name in dict.fromkeys(asked)]
    for variant in chosen:
        if variant in (Variant.MOE, Variant.MOE_R3) and not is_moe:
            raise SettingError(f"--variants {variant}, the model has no experts; take dense")
        if variant is Variant.DENSE and is_moe:
            raise SettingError("--variants dense, the model is a mixture of experts; take moe or moe+r3")
        if variant is Variant.FP8 and (engine != "vllm" or not is_cuda):
            found = f"vllm.engine={engine}" if engine != "vllm" else "no GPU"
            raise SettingError(f"--variants fp8, it needs vLLM on an NVIDIA GPU, got {found}; leave fp8 out here")
    return chosen


def limits(dtype: str, given: Sequence[str], agreement: float) -> dict[Variant, Limit]:
    """Limits of all variants; given: VARIANT=NATS in place of a default."""
    found = dict(LIMITS[dtype])
    for word in given:
        name, _, value = word.partition("=")
        try:
            found[Variant(name)] = float(value)
        except ValueError as error:
            raise SettingError(f"--limits {word}, it must be VARIANT=NATS such as moe+r3=0.01; mend it") from error
    routed = (Variant.MOE, Variant.MOE_R3)
    return {variant: Limit(mean_gap=gap, agreement=agreement if variant in routed else None) for variant, gap in found.items()}
