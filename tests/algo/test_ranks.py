"""Two real ranks on gloo add up to one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from molt.algo.advantage import compute_advantages
from molt.algo.correction import importance_gate
from molt.algo.loss import policy_loss, token_scale
from tests.algo.build import algo, batch_of
from tests.groups import leave_group

ROLLOUTS = [
    {"group": "a", "reward": 1.0, "segments": [10]},
    {"group": "a", "reward": 0.0, "segments": [60, 30]},
    {"group": "b", "reward": 0.5, "segments": [5]},
    {"group": "b", "reward": None, "segments": [7]},
    {"group": "b", "reward": 0.0, "segments": [1]},
]
SETTINGS = algo(advantage={"is_correction_level": "token"}, loss={"aggregation": "seq-mean-token-mean"})


def gradient_of(segments: list[int]) -> torch.Tensor:
    """Gradient by three weights of a tiny policy whose log-probs are linear in them, over some segments of the batch."""
    batch = batch_of(ROLLOUTS)
    generator = torch.Generator().manual_seed(0)
    features_TK = torch.randn(batch.num_tokens, 3, generator=generator)
    weights_K = torch.tensor([0.1, -0.2, 0.05], requires_grad=True)
    advantages_T = compute_advantages("grpo", batch, SETTINGS).advantages_T
    scale_T = token_scale("seq-mean-token-mean", batch)
    old_T = -torch.rand(batch.num_tokens, generator=generator) - 1
    behaviour_T = old_T + 0.1 * torch.randn(batch.num_tokens, generator=generator)
    keep_T = torch.isin(batch.segment_T, torch.tensor(segments))
    _, local_T = torch.unique(batch.segment_T[keep_T], return_inverse=True)
    gate = importance_gate(old_T[keep_T], behaviour_T[keep_T], local_T, SETTINGS)
    logprobs_T = old_T + features_TK @ weights_K
    output = policy_loss(
        "ppo", logprobs_T[keep_T], old_T[keep_T], advantages_T[keep_T], gate.weights_T, scale_T[keep_T], SETTINGS, segment_T=local_T
    )
    output.loss.backward()
    return weights_K.grad


def rank(place: int, folder: str) -> None:
    """One of two ranks: its share of the segments, then a sum over ranks."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=place, world_size=2)
    gradient_K = gradient_of([[0, 3, 5], [1, 2, 4]][place])
    dist.all_reduce(gradient_K, op=dist.ReduceOp.SUM)
    torch.save(gradient_K, f"{folder}/rank{place}.pt")
    leave_group()


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(tmp_path: Path):
    mp.spawn(rank, args=(str(tmp_path),), nprocs=2)
    expected = gradient_of([0, 1, 2, 3, 4, 5])
    for place in range(2):
        found = torch.load(tmp_path / f"rank{place}.pt", weights_only=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_rank_without_trainable_tokens_adds_nothing():
    # the unscored rollout has advantage 0 everywhere: loss 0 and gradient 0, not 0/0
    assert gradient_of([4]).tolist() == [0.0, 0.0, 0.0]
