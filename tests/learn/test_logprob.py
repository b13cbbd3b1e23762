"""Log-probs and entropies in chunks: float32 temperature whatever the model's dtype, exact gradients, no dependence on the chunk."""

from __future__ import annotations

import pytest
import torch

from molt.learn import logprob
from molt.learn.logprob import head_logprobs, logits_logprobs


def parts(n: int = 7, width: int = 5, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    target = torch.randint(vocab, (n,), generator=generator)
    temperature = torch.linspace(0.5, 1.5, n)
    return hidden, weight, target, temperature


def test_temperature_divides_logits_and_never_log_probs() -> None:
    # logits [2, 0] at T = 2: ln(e / (e + 1)) = -0.3133; undivided -0.1269; a divided log-prob would be -0.0635
    weight = torch.tensor([[2.0], [0.0]])
    logp, _ = head_logprobs(torch.ones(1, 1), weight, None, torch.tensor([0]), torch.tensor([2.0]), wants_entropy=False)
    assert logp.item() == pytest.approx(-0.313262, abs=1e-6)
    other, _ = logits_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.tensor([2.0]))
    assert other.item() == pytest.approx(-0.313262, abs=1e-6)


@pytest.mark.parametrize("wants_entropy", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
def test_bfloat16_logits_are_upcast_before_the_temperature(wants_entropy: bool, is_fused: bool) -> None:
    # logits of 20 to 30 in bfloat16: dividing before the upcast would round the quotient by up to 0.06
    logits = torch.tensor([[29.75, 20.125, 25.5, 30.0, 21.0, 22.5, 27.25, 24.0]], dtype=torch.bfloat16)
    target, temperature = torch.tensor([0]), torch.tensor([0.7])
    expected = torch.log_softmax(logits.double() / 0.7, -1)[0, 0]
    if is_fused:  # an identity makes the head's own logits exactly these
        logp, _ = head_logprobs(logits, torch.eye(8, dtype=torch.bfloat16), None, target, temperature, wants_entropy=wants_entropy)
    else:
        logp, _ = logits_logprobs(logits, target, temperature)
    assert logp.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("num_kept", [0, 1 << 20])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_equal_plain_autograd(has_bias: bool, num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprob.KEPT_FLOATS, "cpu", num_kept)
    monkeypatch.setitem(logprob.CHUNK_FLOATS, "cpu", 22)  # two tokens of a vocabulary of 11
    hidden, weight, target, temperature = parts()
    bias = torch.randn(11) if has_bias else None
    mix = torch.linspace(-1, 1, len(target))
    found = []
    for is_chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        b = None if bias is None else bias.clone().requires_grad_()
        if is_chunked:
            logp, entropy = head_logprobs(h, w, b, target, temperature, wants_entropy=True)
        else:
            logp, entropy = logits_logprobs(h @ w.t() if b is None else h @ w.t() + b, target, temperature)
        (mix * logp + 0.3 * entropy).sum().backward()
        found.append([logp.detach(), entropy.detach(), h.grad, w.grad, *([] if b is None else [b.grad])])
    for chunked, plain in zip(*found, strict=True):
        assert torch.allclose(chunked, plain, atol=1e-5)


def test_gradient_agrees_with_finite_differences() -> None:
    hidden, weight, target, temperature = parts(n=2)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))

    def value(step: float) -> float:
        logp, entropy = logits_logprobs(hidden.double() @ (weight + step * direction).double().t(), target, temperature)
        return float((logp + entropy).double().sum())

    w = weight.clone().requires_grad_()
    logp, entropy = head_logprobs(hidden, w, None, target, temperature, wants_entropy=True)
    (logp + entropy).sum().backward()
    assert w.grad is not None
    # central difference over 2e-2: its error is of the order 1e-4 of a slope near 1
    assert float((w.grad * direction).sum()) == pytest.approx((value(1e-2) - value(-1e-2)) / 2e-2, rel=5e-3)


def test_no_tokens_give_no_values_and_no_gradient() -> None:
    hidden = torch.zeros(0, 5, requires_grad=True)
    logp, entropy = head_logprobs(hidden, torch.zeros(11, 5), None, torch.zeros(0, dtype=torch.long), torch.zeros(0), wants_entropy=True)
    (logp.sum() + entropy.sum()).backward()
    assert len(logp) == 0 and hidden.grad is not None and hidden.grad.shape == (0, 5)


def test_log_probs_that_are_kept_and_those_made_again_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target, temperature = parts()
    found = []
    for num_kept in (0, 1 << 20):
        monkeypatch.setitem(logprob.KEPT_FLOATS, "cpu", num_kept)
        w = weight.clone().requires_grad_()
        logp, entropy = head_logprobs(hidden, w, None, target, temperature, wants_entropy=True)
        (logp.sum() - 0.5 * entropy.sum()).backward()
        found.append(w.grad)
    assert torch.equal(*found)
