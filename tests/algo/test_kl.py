"""The divergence term: its gradient is that of the divergence, and its controller moves towards the target."""

from __future__ import annotations

import math

import pytest
import torch

from molt.algo.kl import coefficient_after, kl_estimate, kl_loss, next_coefficient
from molt.config import KlSettings


def test_the_three_estimates_by_hand():
    # d = ln 2: k1 0.6931, k2 0.2402, k3 = 1/2 - 1 + ln 2 = 0.1931
    policy_T, reference_T = torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)])
    for estimator, expected in (("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)):
        assert kl_estimate(estimator, policy_T, reference_T).item() == pytest.approx(expected, rel=1e-5)


def test_estimates_are_zero_on_the_reference_and_finite_far_from_it():
    for estimator in ("k1", "k2", "k3"):
        assert kl_estimate(estimator, torch.tensor([-0.3]), torch.tensor([-0.3])).item() == 0.0
        assert torch.isfinite(kl_estimate(estimator, torch.tensor([-500.0]), torch.tensor([0.0]))).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_is_that_of_the_reverse_divergence(estimator):
    # every outcome of a categorical policy over three tokens, weighted by its probability
    logits = torch.tensor([0.3, -0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    expected = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    found = torch.autograd.grad(kl_loss(estimator, policy, reference, policy.detach().exp()), logits)[0]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_the_plain_gradient_of_k1_and_k3_would_be_wrong():
    # what the loss guards against: mean 0 for k1, the forward divergence for k3
    logits = torch.tensor([0.3, -0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    reverse = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    weights = policy.detach().exp()
    k1 = torch.autograd.grad((weights * kl_estimate("k1", policy, reference)).sum(), logits, retain_graph=True)[0]
    k3 = torch.autograd.grad((weights * kl_estimate("k3", policy, reference)).sum(), logits)[0]
    torch.testing.assert_close(k1, torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (k3 - reverse).abs().max() > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_value_of_the_loss_is_the_estimators(estimator):
    policy_T, reference_T, scale_T = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([0.25, 0.5])
    expected = (scale_T * kl_estimate(estimator, policy_T, reference_T)).sum()
    torch.testing.assert_close(kl_loss(estimator, policy_T, reference_T, scale_T), expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_more_coefficient_means_less_divergence(estimator):
    # gradient descent on coefficient * divergence alone moves towards the reference, faster under a larger coefficient
    reference = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.4], dtype=torch.float64), 0)
    left = []
    for coefficient in (0.1, 0.5):
        logits = torch.tensor([2.0, -0.7, 0.1], dtype=torch.float64, requires_grad=True)
        for _ in range(20):
            policy = torch.log_softmax(logits, 0)
            loss = coefficient * kl_loss(estimator, policy, reference, policy.detach().exp())
            logits = (logits - torch.autograd.grad(loss, logits)[0]).detach().requires_grad_()
        policy = torch.log_softmax(logits, 0)
        left.append((policy.exp() * (policy - reference)).sum().item())
    assert left[1] < left[0]


def test_masked_and_rejected_tokens_have_no_part():
    policy_T = torch.tensor([float("nan"), -1.0, -1.0], requires_grad=True)
    reference_T = torch.tensor([0.0, float("inf"), -2.0])
    value = kl_loss("k3", policy_T, reference_T, torch.tensor([0.0, 1.0, 1.0]), weights_T=torch.tensor([1.0, 0.0, 1.0]))
    value.backward()
    assert value.item() == pytest.approx(math.exp(-1.0))  # d = 1: e^-1 - 1 + 1
    assert policy_T.grad.tolist() == [0.0, 0.0, 1.0]


def test_the_fixed_coefficient_stays():
    assert next_coefficient(0.05, 9.0, target=None, horizon=100) == 0.05


def test_the_adaptive_coefficient_moves_by_at_most_a_fifth_per_horizon():
    # twice the target: error clipped to 0.2; ten of a hundred steps: factor 1.02
    assert next_coefficient(0.1, 2.0, target=1.0, horizon=100, n_steps=10) == pytest.approx(0.102)
    assert next_coefficient(0.1, 0.0, target=1.0, horizon=100, n_steps=10) == pytest.approx(0.098)
    assert next_coefficient(0.1, 1.1, target=1.0, horizon=100, n_steps=10) == pytest.approx(0.101)


def test_a_run_goes_on_with_the_coefficient_of_its_settings_or_with_what_a_controller_had_reached() -> None:
    fixed, steered = KlSettings(coef=0.3), KlSettings(coef=0.3, target=1.0)
    assert [coefficient_after(fixed, reached) for reached in (None, 0.0, 0.1)] == [0.3, 0.3, 0.3]
    assert [coefficient_after(steered, reached) for reached in (None, 0.0, 0.1)] == [0.3, 0.3, 0.1]  # of 0 nothing would ever grow
