"""What a variant would do to a model: the gradient of each on the same batches, their cosines, and how much they vary.

Forward once for each group of rollouts, then one backward pass for each variant. At step start the surrogate's derivative by a token's
log-prob is -scale * weight * advantage for every loss, so a variant's gradient is that vector pulled back through the model.

    cosine      between a variant's gradient over the batches and the baseline's
    noise       (mean over groups of |g|^2 - |mean g|^2) / |mean g|^2: variance of a group's gradient against the gradient itself
    distance    mean |log p_model - log p_recorded|: how far the model given is from the one that made the scores
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from molt.ablate.measure import Tally
from molt.ablate.record import ScoredRun, ScoredStep
from molt.ablate.variants import Grid, Variant
from molt.algo.loss import token_scale
from molt.algo.reward import shape_rewards
from molt.learn.journal import read_images
from molt.learn.model import TokenScorer, load_model
from molt.learn.packing import pack


@dataclass(slots=True)
class _Sums:
    """Sums over groups of every variant's gradient; one row a variant."""

    gradient_VP: torch.Tensor
    """(V, P) float32: sum over groups."""
    square_V: torch.Tensor
    """(V,) float64: sum over groups of the squared norm."""
    num_groups: int = 0
    distance: float = 0.0
    n_tokens: int = 0


def compare_gradients(record: ScoredRun, grid: Grid, baseline: Variant, *, model: str, num_steps: int) -> dict[str, Any]:
    """Cosine to the baseline and noise of each variant over the last num_steps scored steps, under the model of a folder.

    Memory holds one float32 copy of the trainable weights for each variant. Works on the CPU and on a GPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = load_model(model, record.config.actor, record.config.fsdp).to(device)
    parameters = [p for p in scorer.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    variants = grid.variants
    sums = _Sums(gradient_VP=torch.zeros(len(variants), size, device=device), square_V=torch.zeros(len(variants), dtype=torch.float64))
    tally = Tally(grid=grid, config=record.config, baseline=baseline, num_resamples=0, seed=0)
    wanted = set(record.steps_scored[-num_steps:])
    for step in record.steps(wanted):
        _add_step(sums, tally, record, step, scorer, parameters, variants, device)
    base = variants.index(baseline)
    norms_V = sums.gradient_VP.double().norm(dim=1).cpu()
    dots_V = (sums.gradient_VP.double() @ sums.gradient_VP[base].double()).cpu()
    mean_square_V = norms_V.square() / sums.num_groups**2
    noise_V = (sums.square_V / sums.num_groups - mean_square_V) / mean_square_V
    return {
        "model": model,
        "num_steps": len(wanted),
        "num_groups": sums.num_groups,
        "distance": sums.distance / max(sums.n_tokens, 1),
        "variants": {
            variant.text: {
                "cosine": _number(dots_V[v] / (norms_V[v] * norms_V[base])),
                "norm": _number(norms_V[v] / len(wanted)),
                "noise": _number(noise_V[v]),
            }
            for v, variant in enumerate(variants)
        },
    }


def _add_step(
    sums: _Sums,
    tally: Tally,
    record: ScoredRun,
    step: ScoredStep,
    scorer: TokenScorer,
    parameters: list[torch.nn.Parameter],
    variants: list[Variant],
    device: torch.device,
) -> None:
    """Add the gradient of every group of one batch under every variant."""
    slopes_VT = _slopes(tally, record, step, variants)
    segments = record.cut.segments([row.segment_id for row in step.plan.segments])
    temperatures = segments.column("temperature").to_numpy()
    images = read_images(record.cut, segments)
    bounds = np.concatenate([[0], np.cumsum(step.batch.lengths_S.numpy())])
    group_S = step.batch.group_S.numpy()
    for group in np.unique(group_S):
        places = np.flatnonzero((group_S == group) & (step.batch.lengths_S.numpy() > 0))
        if not len(places):
            continue
        spans = [slice(int(segments.offsets_S[p]), int(segments.offsets_S[p + 1])) for p in places]
        index_N = torch.from_numpy(np.concatenate([np.arange(bounds[p], bounds[p + 1]) for p in places]))
        packed = pack(
            [segments.token_ids_T[span] for span in spans],
            [segments.is_sampled_T[span] for span in spans],
            [float(temperatures[p]) for p in places],
            images=[images[p] for p in places],
        )
        logprobs_N, _ = scorer(packed.to(device))
        sums.distance += float((logprobs_N.detach().cpu() - step.trainer_logprobs_T[index_N]).abs().sum())
        sums.n_tokens += len(index_N)
        sums.num_groups += 1
        for v in range(len(variants)):
            found = torch.autograd.grad(
                logprobs_N, parameters, grad_outputs=slopes_VT[v, index_N].to(device), retain_graph=v + 1 < len(variants), allow_unused=True
            )
            flat_P = torch.cat(
                [(torch.zeros_like(p) if g is None else g).reshape(-1).float() for p, g in zip(parameters, found, strict=True)]
            )
            sums.gradient_VP[v] += flat_P
            sums.square_V[v] += float(flat_P.double().square().sum())


def _slopes(tally: Tally, record: ScoredRun, step: ScoredStep, variants: list[Variant]) -> torch.Tensor:
    """-scale * weight * advantage of each sampled token under each variant. # (V, T)"""
    shaped = shape_rewards(step.batch, record.config.algo, max_len=record.config.data.max_len).batch
    advantages_ET, _ = tally.advantages(step, shaped)
    weights_KT, _ = tally.weights(step)
    e_of = {choice.text: place for place, choice in enumerate(tally.grid.estimators)}
    k_of = {choice.text: place for place, choice in enumerate(tally.grid.gates)}
    scales = {name: token_scale(name, step.batch).numpy() for name in tally.grid.aggregations}
    rows = [-scales[v.aggregation] * weights_KT[k_of[v.gate]] * advantages_ET[e_of[v.estimator]] for v in variants]
    return torch.from_numpy(np.stack(rows))


def _number(value: torch.Tensor) -> float | None:
    return float(value) if bool(torch.isfinite(value)) else None
