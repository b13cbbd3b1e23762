"""Gates and losses on a GPU: the CPU's numbers, and the same bits twice."""

from __future__ import annotations

import pytest
import torch

from molt.algo.correction import importance_gate
from molt.algo.kl import kl_loss
from molt.algo.loss import policy_loss
from tests.algo.build import algo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def columns(device):
    """Seeded columns of 200,000 tokens in 300 segments of uneven length, one of them empty."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.cat([torch.randint(0, 200_000, (298,), generator=generator).sort().values, torch.tensor([200_000])])
    lengths = torch.diff(torch.cat([torch.tensor([0]), cuts]))
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    old_T = -torch.rand(200_000, generator=generator)
    noise = [torch.randn(200_000, generator=generator) for _ in range(4)]
    made = [segment_T, old_T, old_T + 0.02 * noise[0], old_T + 0.05 * noise[1], noise[2], old_T + 0.1 * noise[3]]
    return [column.to(device) for column in made]


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_the_gpu_agrees_with_the_cpu_and_with_itself(level, name):
    settings = algo(advantage={"is_correction_level": level, "is_correction_mode": "clip"}, loss={"name": name})
    found = []
    for device in ("cpu", "cuda", "cuda"):
        segment_T, old_T, behaviour_T, now_T, advantages_T, reference_T = columns(device)
        leaf_T = now_T.clone().requires_grad_()
        gate = importance_gate(old_T, behaviour_T, segment_T, settings, num_segments=300)
        scale_T = torch.full_like(old_T, 1 / len(old_T))
        output = policy_loss(name, leaf_T, old_T, advantages_T, gate.weights_T, scale_T, settings, segment_T=segment_T)
        loss = output.loss + 0.1 * kl_loss("k3", leaf_T, reference_T, scale_T, gate.weights_T)
        loss.backward()
        found.append((gate.weights_T.cpu(), loss.detach().cpu(), leaf_T.grad.cpu()))
    for cpu, gpu, again in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-5, atol=1e-9)
        assert torch.equal(gpu, again)
