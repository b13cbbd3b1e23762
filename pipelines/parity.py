"""Parity: the same tokens through a real engine and through the trainer's scorer, and how far apart their log-probs and experts are.

Copy this file and edit it: `molt parity ... --pipeline my_parity.py` runs the copy.

    prompts --> engine samples, with its routes --> trainer scores the same ids --> distance by variant, against its limit
                engine again, in fp8            -->
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from molt.config import Config
from molt.model_shape import ModelShape
from molt.parity.measure import measure_gap
from molt.parity.prompts import asked
from molt.parity.sides import Sample, Scored, sample, trainer
from molt.parity.variants import Limit, Variant, choose, limits
from molt.rollout.spec import engine_kind


async def main(
    config: Config,
    *,
    variants: Sequence[str] = (),
    given_limits: Sequence[str] = (),
    agreement: float,
    prompts: Path | None = None,
    num_samples: int = 4,
) -> dict[str, Any]:
    """One row of figures for each variant, each with its verdict."""
    model = str(config.actor.model_name_or_path)
    shape = ModelShape.read(model)
    is_moe, engine = shape.num_experts > 1, engine_kind(config)
    chosen = choose(variants, is_moe=is_moe, is_cuda=torch.cuda.is_available(), engine=engine)
    bounds = limits(config.actor.dtype, given_limits, agreement)
    config = config.model_copy(update={"train": config.train.model_copy(update={"routing_replay": is_moe})})

    questions = asked(config, file=prompts, vocab_size=shape.vocab_size)
    plain = [variant for variant in chosen if variant is not Variant.FP8]
    samples: dict[str | None, list[Sample]] = {}
    if plain:
        samples[None] = await sample(config, questions, num_samples=num_samples)
    if Variant.FP8 in chosen:
        samples["fp8"] = await sample(config, questions, num_samples=num_samples, quantization="fp8")

    rows = []
    with trainer(config, is_moe=is_moe) as scorer:
        for variant in chosen:
            own = samples["fp8" if variant is Variant.FP8 else None]
            scored = scorer.score(own, is_replayed=variant is Variant.MOE_R3)
            rows.append(row(variant, own, scored, bounds[variant]))
    return {
        "model": model,
        "engine": engine,
        "dtype": config.actor.dtype,
        "num_prompts": len(questions),
        "num_images": sum(len(question.images) for question in questions),
        "num_samples": num_samples,
        "rows": rows,
        "is_within": all(found["is_within"] for found in rows),
    }


def row(variant: Variant, samples: Sequence[Sample], scored: Scored, limit: Limit) -> dict[str, Any]:
    """Figures of one variant. What is not a number is above every limit."""
    gap = measure_gap(np.concatenate([item.logprobs for item in samples]), scored.logprobs)
    shares = [count.overlap / count.n_replayed for count in scored.counts if count.n_replayed]
    least = min(shares) if shares else None
    is_within = gap.mean <= limit.mean_gap and (limit.agreement is None or (least is not None and least >= limit.agreement))
    return {
        "variant": str(variant),
        **asdict(gap),
        "agreement_min": least,
        "agreement_mean": float(np.mean(shares)) if shares else None,
        "agreement_by_layer": shares,
        "limit_mean": limit.mean_gap,
        "limit_agreement": limit.agreement,
        "is_within": is_within,
    }
