"""Speculative decoding in the vLLM engine: the contract on a model with a draft head, whose guesses must not show in any log-prob."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch

from tests.rollout.engine_contract import PROMPT, TOLERANCE, Bench, EngineContract, sampling
from tests.rollout.test_vllm import started

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = request.getfixturevalue("tiny_mtp")
    bench = await started(folder, tmp_path_factory.mktemp("weights"), num_speculative_tokens=2, is_counted=True)
    yield bench
    await bench.engine.stop()


def acceptance(bench: Bench, before: tuple[int, int]) -> float:
    """Share of the drafts since `before` that were accepted."""
    counts = bench.engine.counts
    return (counts.n_accepted - before[1]) / (counts.n_drafted - before[0])


def counted(bench: Bench) -> tuple[int, int]:
    return bench.engine.counts.n_drafted, bench.engine.counts.n_accepted


@pytest.mark.asyncio(loop_scope="class")
class TestVllmSpeculation(EngineContract):
    """Everything that an engine must do, with drafts two tokens ahead."""

    async def test_equal_seeds_repeat_and_other_seeds_differ(self, bench: Bench) -> None:
        # Drafts and their checks take random numbers by the batch, so a call's tokens depend on its neighbours; alone it repeats.
        first, again, other = [await bench.generate(PROMPT, sampling(seed=seed)) for seed in (7, 7, 8)]
        assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()

    async def test_drafts_are_accepted_and_leave_the_distribution_as_it_is(self, bench: Bench) -> None:
        before = counted(bench)
        results = [await bench.generate(PROMPT, sampling(max_new_tokens=300, seed=seed)) for seed in range(4)]
        for result in results:
            assert np.abs(result.logprobs - bench.logprobs(PROMPT, result.token_ids, 1.0)).max() < TOLERANCE
        assert 0.5 < acceptance(bench, before) < 0.95
        # The likely successor was sampled as often as the model says, not as often as it was drafted: with n = 1200 tokens of
        # probability p about 0.7, the share's standard deviation is sqrt(p (1 - p) / n) = 0.013; four of them are allowed.
        is_likely, expected = [], []
        for result in results:
            probs = torch.softmax(bench.logits([*PROMPT, *result.token_ids.tolist()])[len(PROMPT) - 1 : -1], -1).max(-1)
            is_likely += (probs.indices.numpy() == result.token_ids).tolist()
            expected += probs.values.tolist()
        assert abs(np.mean(is_likely) - np.mean(expected)) < 0.053

    async def test_a_refit_leaves_the_draft_head_and_its_drafts_are_still_checked(self, bench: Bench) -> None:
        names = set(bench.change(seed=0, scale=0.0))
        assert not any("mtp" in name for name in names), "the trainer's model has no draft head"
        await bench.refit(seed=5)
        before = counted(bench)
        result = await bench.generate(PROMPT, sampling(max_new_tokens=300))
        assert np.abs(result.logprobs - bench.logprobs(PROMPT, result.token_ids, 1.0)).max() < TOLERANCE
        assert set(result.policy_versions.tolist()) == {bench.version}
        # Embeddings and head are shared with the model, so the drafts follow what they learn.
        assert acceptance(bench, before) > 0.3
