"""Surrogates, aggregations and the critic's loss: values by hand, gradients by finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from molt.algo.loss import entropy_loss, loss_names, policy_loss, token_scale
from molt.algo.value import value_loss
from molt.errors import SettingError
from tests.algo.build import NAN, algo, batch_of

LN = math.log


def loss_of(log_ratios, advantages, *, name="ppo", weights=None, scale=None, **keys):
    """(loss, gradient, output) with old log-probs of -1."""
    logprobs_T = (torch.tensor(log_ratios, dtype=torch.float64) - 1.0).requires_grad_()
    n = len(log_ratios)
    output = policy_loss(
        name,
        logprobs_T,
        torch.full((n,), -1.0, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(weights if weights is not None else [1.0] * n, dtype=torch.float64),
        torch.tensor(scale if scale is not None else [1.0] * n, dtype=torch.float64),
        algo(loss={"name": name, **keys}),
        segment_T=torch.zeros(n, dtype=torch.int64),
    )
    output.loss.backward()
    return output.loss.item(), logprobs_T.grad, output


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.2, 0.0),  # clipped above at 1.2: no gradient
        (0.5, 1.0, -0.5, -0.5),  # below the band a good token is not clipped
        (0.5, -1.0, 0.8, 0.0),  # clipped below at 0.8
        (1.5, -1.0, 1.5, 1.5),  # above the band a bad token is not clipped
    ],
)
def test_ppo_by_hand(ratio, advantage, value, slope):
    found, gradient, _ = loss_of([LN(ratio)], [advantage])
    assert found == pytest.approx(value)
    assert gradient.item() == pytest.approx(slope)


def test_ppo_clip_may_be_asymmetric():
    assert loss_of([LN(1.25)], [1.0], clip_low=0.2, clip_high=0.28)[0] == pytest.approx(-1.25)
    assert loss_of([LN(1.3)], [1.0], clip_low=0.2, clip_high=0.28)[0] == pytest.approx(-1.28)


def test_dual_clip_bounds_a_bad_token():
    # ratio 10, advantage -1: 10 without, 3 with
    assert loss_of([LN(10.0)], [-1.0])[0] == pytest.approx(10.0)
    value, gradient, output = loss_of([LN(10.0)], [-1.0], dual_clip=3.0)
    assert (value, gradient.item()) == (pytest.approx(3.0), 0.0)
    assert output.metrics["n_clipped"].item() == 1
    assert loss_of([LN(10.0)], [1.0], dual_clip=3.0)[0] == pytest.approx(-1.2)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    # ratio 2 is clipped to 1.2 and multiplies grad log p: gradient -1.2
    value, gradient, output = loss_of([LN(2.0)], [1.0], name="cispo")
    assert gradient.item() == pytest.approx(-1.2)
    assert value == pytest.approx(-1.2 * (LN(2.0) - 1.0))
    assert output.metrics["n_clipped"].item() == 1


def test_gspo_uses_the_geometric_mean():
    # ratios 2 and 0.5: mean log-ratio 0, s = 1, so nothing is clipped although each token would be under ppo
    value, gradient, output = loss_of([LN(2.0), LN(0.5)], [1.0, 1.0], name="gspo", clip_low=3e-4, clip_high=4e-4)
    assert value == pytest.approx(-2.0)
    assert gradient.tolist() == pytest.approx([-1.0, -1.0])
    assert output.metrics["n_clipped"].item() == 0


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_dropped_sequence_has_no_gradient(name):
    value, gradient, output = loss_of([0.3, 0.3], [1.0, 1.0], name=name, weights=[0.0, 0.0])
    assert value == 0.0
    assert gradient.tolist() == [0.0, 0.0]
    assert output.metrics["n_live"].item() == 0


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("junk", [200.0, NAN, float("inf"), float("-inf")])
def test_a_padding_slot_reaches_neither_loss_nor_gradient(name, junk):
    value, gradient, _ = loss_of([junk, 0.0], [1.0, 1.0], name=name, scale=[0.0, 1.0])
    assert math.isfinite(value)
    assert gradient[0] == 0.0 and gradient[1] == -1.0


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_huge_ratio_at_zero_advantage_is_finite(name):
    value, gradient, output = loss_of([200.0], [0.0], name=name)
    assert value == 0.0 and gradient.item() == 0.0
    assert output.metrics["n_bounded"].item() == 1


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_live_nan_is_surfaced(name):
    value, _, output = loss_of([NAN, 0.0], [1.0, 1.0], name=name)
    assert math.isnan(value)
    assert output.metrics["n_non_finite"].item() >= 1


def test_the_weight_multiplies_the_token():
    assert loss_of([0.0, 0.0], [1.0, 1.0], weights=[2.0, 0.5])[0] == pytest.approx(-2.5)


def test_unknown_loss_lists_the_known_ones():
    with pytest.raises(SettingError, match=r"algo.loss.name=pop is unknown; known are cispo, gspo, ppo"):
        loss_of([0.0], [1.0], name="pop")


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_gradient_by_finite_differences(name):
    generator = torch.Generator().manual_seed(3)
    old_T = -torch.rand(12, generator=generator, dtype=torch.float64) - 0.1
    start_T = old_T + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    advantages_T = torch.randn(12, generator=generator, dtype=torch.float64)
    weights_T = torch.rand(12, generator=generator, dtype=torch.float64).round(decimals=1)
    scale_T = torch.rand(12, generator=generator, dtype=torch.float64)
    segment_T = torch.arange(12) // 4
    # cispo holds its weight fixed, gspo the other tokens of the segment: their values are differentiated token by token below
    settings = algo(loss={"name": name, "clip_low": 0.15, "clip_high": 0.15})

    def value(logprobs_T):
        return policy_loss(name, logprobs_T, old_T, advantages_T, weights_T, scale_T, settings, segment_T=segment_T).loss

    leaf_T = start_T.clone().requires_grad_()
    value(leaf_T).backward()
    log_ratio_T = start_T - old_T
    if name == "ppo":
        step = 1e-6
        for i in range(12):
            up, down = start_T.clone(), start_T.clone()
            up[i] += step
            down[i] -= step
            assert leaf_T.grad[i].item() == pytest.approx(((value(up) - value(down)) / (2 * step)).item(), abs=1e-7)
        return
    for i in range(12):
        if name == "cispo":
            expected = -min(max(math.exp(log_ratio_T[i]), 0.85), 1.15) * advantages_T[i].item()
        else:
            s = math.exp(log_ratio_T[segment_T == segment_T[i]].mean())
            a = advantages_T[i].item()
            expected = -a * s if (-a * s >= -a * min(max(s, 0.85), 1.15)) else 0.0
        assert leaf_T.grad[i].item() == pytest.approx(expected * weights_T[i].item() * scale_T[i].item(), abs=1e-9)


def test_token_mean_counts_tokens_not_micro_batches():
    # micro-batch 1: one token of loss 1; micro-batch 2: three of loss 0. 0.25, not 0.5
    batch = batch_of([{"group": "a", "reward": 1.0, "segments": [1, 3]}])
    scale_T = token_scale("token-mean", batch)
    token_loss_T = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert (scale_T[:1] * token_loss_T[:1]).sum() + (scale_T[1:] * token_loss_T[1:]).sum() == 0.25


def test_token_mean_is_one_denominator_over_ranks():
    # rank 0: ten tokens summing to 10; rank 1: ninety of 0. 0.1, not 0.5
    scale_T = token_scale("token-mean", batch_of([{"group": "a", "reward": 1.0, "segments": [10, 90]}]))
    assert (scale_T[:10] * 1.0).sum().item() == pytest.approx(0.1)


def test_rejected_tokens_stay_in_the_denominator():
    # five tokens, three rejected, loss 1 on the kept: 2/5, not 2/2
    scale_T = token_scale("token-mean", batch_of([{"group": "a", "reward": 1.0, "segments": [5]}]))
    value, _, output = loss_of([0.0] * 5, [-1.0] * 5, weights=[1, 0, 0, 0, 1], scale=scale_T.tolist())
    assert value == pytest.approx(0.4)
    assert output.metrics["n_live"].item() == 2


def test_masked_tokens_stay_in_the_denominator():
    batch = batch_of([{"group": "a", "reward": 1.0, "segments": [4]}], is_trainable_T=torch.tensor([True, False, True, False]))
    assert token_scale("token-mean", batch).tolist() == [0.25, 0.0, 0.25, 0.0]


def test_sequence_mean_is_over_rollouts_with_all_their_segments():
    # A: segments of 1 and 3 tokens, B: one of 2, C: none sampled. A's tokens weigh 1/4/2, B's 1/2/2
    rollouts = [
        {"group": "a", "reward": 1.0, "segments": [1, 3]},
        {"group": "a", "reward": 1.0, "segments": [2]},
        {"group": "a", "reward": 1.0, "segments": [0]},
    ]
    assert token_scale("seq-mean-token-mean", batch_of(rollouts)).tolist() == [0.125] * 4 + [0.25] * 2


def test_prompt_mean_is_over_groups():
    # group a: 1 + 3 tokens, group b: 2. Half of the loss each
    rollouts = [
        {"group": "a", "reward": 1.0, "segments": [1]},
        {"group": "a", "reward": 1.0, "segments": [3]},
        {"group": "b", "reward": 1.0, "segments": [2]},
    ]
    assert token_scale("prompt-mean-token-mean", batch_of(rollouts)).tolist() == [0.125] * 4 + [0.25] * 2


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"])
def test_a_batch_without_tokens_has_an_empty_scale(aggregation):
    assert token_scale(aggregation, batch_of([{"group": "a", "reward": 1.0, "segments": [0]}])).shape == (0,)
    assert token_scale(aggregation, batch_of([])).shape == (0,)


def test_a_wholly_masked_batch_has_loss_zero_and_zero_gradient():
    batch = batch_of([{"group": "a", "reward": 1.0, "segments": [3]}], is_trainable_T=torch.zeros(3, dtype=torch.bool))
    value, gradient, output = loss_of([0.1] * 3, [1.0] * 3, scale=token_scale("token-mean", batch).tolist())
    assert value == 0.0 and gradient.tolist() == [0.0] * 3
    assert output.metrics["n_live"].item() == 0


def test_entropy_is_a_bonus():
    entropy_T = torch.tensor([1.0, 2.0, NAN], requires_grad=True)
    value = entropy_loss(entropy_T, torch.tensor([0.5, 0.5, 0.0]), 0.1)
    value.backward()
    assert value.item() == pytest.approx(-0.15)
    assert entropy_T.grad.tolist() == pytest.approx([-0.05, -0.05, 0.0])


def test_value_loss_by_hand():
    # old 0, new 1, target 2, clip 0.2: clipped value 0.2, error 1.8^2 = 3.24 beats 1; half of it
    values_T = torch.tensor([1.0, NAN], requires_grad=True)
    output = value_loss(values_T, torch.zeros(2), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]), clip=0.2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1.62)
    assert values_T.grad.tolist() == [0.0, 0.0]
    assert output.metrics["n_clipped"].item() == 1
    assert value_loss(values_T, torch.zeros(2), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]), clip=None).loss.item() == 0.5


def test_gradient_of_the_value_loss_by_finite_differences():
    generator = torch.Generator().manual_seed(5)
    values_T, old_T, returns_T = (torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(3))
    scale_T = torch.rand(9, generator=generator, dtype=torch.float64)
    leaf_T = values_T.clone().requires_grad_()
    value_loss(leaf_T, old_T, returns_T, scale_T, clip=0.3).loss.backward()
    step = 1e-6
    for i in range(9):
        up, down = values_T.clone(), values_T.clone()
        up[i] += step
        down[i] -= step
        slope = value_loss(up, old_T, returns_T, scale_T, clip=0.3).loss - value_loss(down, old_T, returns_T, scale_T, clip=0.3).loss
        assert leaf_T.grad[i].item() == pytest.approx((slope / (2 * step)).item(), abs=1e-7)


def test_losses_are_listed():
    assert loss_names() == ["cispo", "gspo", "ppo"]
