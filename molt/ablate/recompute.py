"""Online equals offline: advantages, gates and losses of every recorded step computed again from the log and compared bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from molt.ablate.record import ScoredRun, ScoredStep
from molt.algo.advantage import compute_advantages
from molt.algo.correction import importance_gate
from molt.algo.kl import kl_estimate, kl_loss
from molt.algo.loss import policy_loss, token_scale
from molt.algo.reward import shape_rewards
from molt.config import AlgoSettings, Config


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step: sampled tokens whose value differs in any bit, and whether the loss digest is the recorded one."""

    step: int
    n_sampled: int
    n_advantages_differ: int
    n_weights_differ: int
    is_loss_equal: bool | None
    """None where the log cannot tell: an entropy term, a refused step, or several ranks on unlike hardware."""

    @property
    def is_equal(self) -> bool:
        """Nothing differs."""
        return self.n_advantages_differ == 0 and self.n_weights_differ == 0 and self.is_loss_equal is not False


def compare_run(run: ScoredRun) -> list[StepComparison]:
    """Every usable step of a run, in order, each under the settings that it was made with."""
    return [compare_step(step, run.config_of(step.step), recorded=run.outcomes.get(step.step)) for step in run.steps()]


def compare_step(step: ScoredStep, config: Config, *, recorded: Mapping[str, Any] | None) -> StepComparison:
    """One step under its own settings, gates and losses micro-batch by micro-batch as the plan cuts it."""
    algo = algo_of(config, recorded)
    advantages_T = _advantages(step, config, algo)
    scale_T = token_scale(config.algo.loss.aggregation, step.batch)
    weights_T = torch.zeros_like(step.trainer_logprobs_T)
    bounds = np.concatenate([[0], np.cumsum(step.batch.lengths_S.numpy())])
    losses = []
    for rank in step.plan.micro_batches:
        for places in rank:
            parts = [np.arange(bounds[place], bounds[place + 1]) for place in places]
            index_N = torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64))
            row_N = torch.repeat_interleave(torch.arange(len(places)), step.batch.lengths_S[list(places)])
            # A dummy's loss is a sum of log-probs times 0, and that sum is negative.
            losses.append(_micro_batch(step, algo, index_N, row_N, advantages_T, scale_T, weights_T) if places else -0.0)
    then_T, gated_T = step.columns["advantages"], step.columns["gate_weights"]
    assert then_T is not None and gated_T is not None, "these columns are never null"
    return StepComparison(
        step=step.step,
        n_sampled=step.batch.num_tokens,
        n_advantages_differ=int((then_T != advantages_T).sum()),
        n_weights_differ=int((gated_T != weights_T).sum()),
        is_loss_equal=_loss_equal(losses, config, recorded),
    )


def algo_of(config: Config, recorded: Mapping[str, Any] | None) -> AlgoSettings:
    """The settings of one step: the run's, with the coefficient of the divergence that the adaptive controller had reached."""
    coefficient = json.loads(recorded["metrics"]).get("kl_coef") if recorded and "metrics" in recorded else None
    if coefficient is None or config.algo.kl.target is None:
        return config.algo
    return config.algo.model_copy(update={"kl": config.algo.kl.model_copy(update={"coef": coefficient})})


def _advantages(step: ScoredStep, config: Config, algo: AlgoSettings) -> torch.Tensor:
    reference_T = step.columns["reference_logprobs"]
    has_kl_reward = algo.kl.use == "reward" and algo.kl.coef > 0
    return compute_advantages(
        algo.advantage.estimator,
        shape_rewards(step.batch, algo, max_len=config.data.max_len).batch,
        algo,
        kl_T=kl_estimate(algo.kl.estimator, step.trainer_logprobs_T, reference_T) if has_kl_reward and reference_T is not None else None,
        values_T=step.columns["values"],
        logprobs_T=step.trainer_logprobs_T,
        teacher_logprobs_T=step.columns["teacher_logprobs"],
    ).advantages_T


def _micro_batch(
    step: ScoredStep,
    algo: AlgoSettings,
    index_N: torch.Tensor,
    row_N: torch.Tensor,
    advantages_T: torch.Tensor,
    scale_T: torch.Tensor,
    weights_T: torch.Tensor,
) -> float:
    """Gate and loss of one micro-batch at step start; its weights are written to weights_T."""
    old_N = step.trainer_logprobs_T[index_N]
    gate = importance_gate(
        old_N,
        step.behaviour_logprobs_T[index_N],
        row_N,
        algo,
        num_segments=int(row_N.max()) + 1 if len(row_N) else 0,
        is_trainable_T=step.batch.trainable_T()[index_N],
        version_T=step.version_T[index_N],
        trainer_version=step.plan.policy_version,
    )
    weights_T[index_N] = gate.weights_T
    scale_N = scale_T[index_N]
    loss = policy_loss(algo.loss.name, old_N, old_N, advantages_T[index_N], gate.weights_T, scale_N, algo, segment_T=row_N).loss
    reference_T = step.columns["reference_logprobs"]
    if algo.kl.coef > 0 and algo.kl.use == "loss" and reference_T is not None:
        loss = loss + algo.kl.coef * kl_loss(algo.kl.estimator, old_N, reference_T[index_N], scale_N, gate.weights_T)
    return float(loss)


def _loss_equal(losses: list[float], config: Config, recorded: Mapping[str, Any] | None) -> bool | None:
    """Whether the digest over the float32 losses, rank by rank and micro-batch by micro-batch, is the recorded one."""
    if recorded is None or "loss_digest" not in recorded or config.algo.loss.entropy_coef != 0:
        return None
    lines = "\n".join(np.float32(loss).tobytes().hex() for loss in losses)
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest() == recorded["loss_digest"]
