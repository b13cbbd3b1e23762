"""Rows of a log, planned and trained, against a plain float64 computation of the same step: loss, gradient, advantages, weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from molt.admission.plan import StepPlan, plan_step
from molt.learn.rank import PolicyRank
from molt.learn.result import RefusalReason
from tests.learn.oracle import VERSION, Oracle, double_model, make_batch, with_behaviour
from tests.learn.tiny import make_config, make_model, make_rank

Models = tuple[Path, torch.nn.Module, torch.nn.Module]


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The policy's folder, the policy and another model in float64."""
    other = make_model(tmp_path_factory.mktemp("other"), seed=5)
    return model, double_model(model), double_model(other)


def settings(dice: random.Random) -> dict[str, Any]:
    """Rooms of algo, drawn."""
    name = dice.choice(["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "flash_reinforce", "on_policy_distill"])
    level, mode = dice.choice(["off", "token", "seq", "geo"]), dice.choice(["mask", "clip", "trunc"])
    advantage: dict[str, Any] = {"estimator": name, "is_correction_level": level}
    if name.startswith("reinforce"):
        advantage["gamma"] = dice.choice([1.0, 0.9, 0.0])
    if level != "off":
        gate = "ratio" if level == "geo" else dice.choice(["ratio", "ratio", "kl", "tv"])
        mode = mode if gate == "ratio" else "mask"
        low = None if gate != "ratio" or mode == "trunc" else 0.5
        high = {"kl": 0.05, "tv": 0.15}.get(gate, 1.4)
        advantage |= {"is_correction_mode": mode, "gate": gate, "is_correction_threshold": (low, high)}
        if dice.random() < 0.4:
            advantage |= {"decoupled": True, "is_mismatch_threshold": (low, high)}
    use = "loss" if name == "on_policy_distill" else dice.choice(["loss", "reward"])
    return {
        "advantage": advantage,
        "kl": {"coef": dice.choice([0.0, 0.1]), "estimator": dice.choice(["k1", "k2", "k3"]), "use": use},
        "loss": {
            "name": dice.choice(["ppo", "cispo", "gspo"]),
            "aggregation": dice.choice(["token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"]),
            "entropy_coef": dice.choice([0.0, 0.05]),
        },
        "reward": dice.choice([{}, {"clip": (-0.2, 0.8)}, {"stop_properly_penalty": 0.5, "overlong_buffer": 20}]),
    }


def gradient_of(rank: PolicyRank) -> dict[str, torch.Tensor]:
    """A dictionary that the next update fills with what it is made from."""
    found: dict[str, torch.Tensor] = {}
    update = rank.policy.update

    def watched() -> Any:
        named = rank.policy.scorer.named_parameters()
        found.update({name.removeprefix("lm."): p.grad.full_tensor().double() for name, p in named if p.grad is not None})
        return update()

    rank.policy.update = watched  # type: ignore[method-assign]
    return found


def frozen_scores(plan: StepPlan, expected: Oracle) -> list[np.ndarray]:
    """What a frozen model says of the micro-batches of the one rank."""
    return [
        np.array([value for place in places for value in expected.frozen[plan.segments[place].segment_id]], np.float32)
        for places in plan.micro_batches[0]
    ]


@pytest.mark.parametrize("seed", range(40))
def test_step_is_what_the_formulas_say(models: Models, seed: int) -> None:
    folder, policy, other = models
    dice = random.Random(seed)
    algo = settings(dice)
    rows, segments = make_batch(seed, is_mixed=algo["advantage"]["is_correction_level"] != "off")
    rows = with_behaviour(rows, policy, seed)
    changes: dict[str, Any] = {"algo": algo, "data": {"max_len": 40}, "train": {"micro_batch_tokens": dice.choice([40, 400])}}
    has_frozen = algo["kl"]["coef"] > 0 or algo["advantage"]["estimator"] == "on_policy_distill"
    config = make_config(folder, **changes | ({"reference": {"model_name_or_path": "apart", "placement": "apart"}} if has_frozen else {}))
    expected = Oracle(config=config, rows=rows, segments=segments, model=policy, reference=other if has_frozen else None).compute()
    plan = plan_step(
        dice.sample(segments, len(segments)), step=0, policy_version=VERSION, seed=0, num_ranks=1,
        micro_batch_tokens=config.train.micro_batch_tokens, cursor=0,
    )  # fmt: skip
    rank = make_rank(config, rows)
    gradient = gradient_of(rank)
    result = rank.train(plan, None, frozen_scores(plan, expected) if has_frozen else None)
    n_kept = sum(weight != 0 for column in expected.weights.values() for weight in column)
    assert result.n_kept == n_kept
    if n_kept == 0:
        assert result.refused is not None and result.refused.reason is RefusalReason.NOTHING_KEPT
        return
    (step,) = rank.journal.written
    for batch, gate in zip(step.batches, step.columns.gates, strict=True):
        names = [plan.segments[place].segment_id for place in batch.places]
        for made, wanted in ((step.known.advantages_of(batch), expected.advantages), (gate.weights_T, expected.weights)):
            assert made.tolist() == pytest.approx([value for name in names for value in wanted[name]], rel=1e-3, abs=1e-4)
    assert result.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
    length = sum(float(part.square().sum()) for part in expected.gradient.values()) ** 0.5
    gap = sum(float((part - gradient[name]).square().sum()) for name, part in expected.gradient.items()) ** 0.5
    assert gap <= 1e-3 * length + 1e-6  # float32 forward and backward against float64
