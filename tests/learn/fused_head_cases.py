"""Cases of the fused head. test_fused_head.py runs them in a process whose Triton interprets its kernels, on the CPU."""

from __future__ import annotations

import pytest
import torch

from molt.learn import fused_head
from molt.learn.logprob import head_logprobs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "BLOCK", 16)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_head_gives_values_and_gradients_of_the_plain_one(is_kept: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "_room", lambda device: (1 << 20) * is_kept)
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 3 * 37 * 4)  # three tokens a chunk, so that the last one is short
    seed = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 5, generator=seed), torch.randn(37, 5, generator=seed)
    bias = torch.randn(37, generator=seed) if has_bias else None
    target, temperature = torch.randint(0, 37, (7,), generator=seed), torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 0.5])
    mix = torch.randn(7, generator=seed)
    found = []
    for is_fused in (False, True):
        h, w, b = (None if part is None else part.clone().requires_grad_() for part in (hidden, weight, bias))
        if is_fused:
            logp, entropy = fused_head.head_logprobs(h, w, b, target, temperature)
        else:
            logp, entropy = head_logprobs(h, w, b, target, temperature, wants_entropy=True)
        (mix * logp + 0.3 * entropy).sum().backward()
        found.append([logp.detach(), entropy.detach(), h.grad, w.grad, *([] if b is None else [b.grad])])
    for plain, fused in zip(*found, strict=True):
        assert torch.allclose(plain, fused, atol=1e-5)


def test_an_entropy_that_is_only_looked_at_adds_nothing_to_the_gradient() -> None:
    hidden, weight = torch.randn(3, 5), torch.randn(37, 5, requires_grad=True)
    target, temperature = torch.tensor([0, 36, 16]), torch.ones(3)
    fused_head.head_logprobs(hidden, weight, None, target, temperature)[0].sum().backward()
    other = weight.detach().clone().requires_grad_()
    torch.log_softmax(hidden @ other.t(), -1).gather(1, target[:, None]).sum().backward()
    assert weight.grad is not None and other.grad is not None
    assert torch.allclose(weight.grad, other.grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy under the interpreter remarks on what is tested here
def test_a_logit_that_is_not_finite_is_seen_in_the_log_prob() -> None:
    for bad in (float("nan"), float("inf")):
        hidden, weight = torch.ones(2, 1), torch.zeros(37, 1)
        weight[5] = bad
        logp, _ = fused_head.head_logprobs(hidden, weight, None, torch.tensor([0, 36]), torch.ones(2))
        assert not torch.isfinite(logp).any()
