"""The embedded engine: the contract, dense and with experts, and what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from molt.rollout.embedded import EmbeddedEngine
from molt.rollout.vision import model_class
from molt.rollout.weights import named_weights, write_weights
from tests.rollout.engine_contract import PROMPT, TOLERANCE, Bench, EngineContract, sampling, wait_for_tokens
from tests.rollout.image_contract import ImageContract


async def started(folder: Path, work: Path, **options: object) -> Bench:
    from transformers import AutoConfig

    engine = EmbeddedEngine(str(folder), max_len=448, **options)
    info = await engine.start()
    kind = model_class(AutoConfig.from_pretrained(folder))
    model = kind.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Bench(engine=engine, info=info, model=model, folder=work)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    bench = await started(request.getfixturevalue(request.cls.model), tmp_path_factory.mktemp("weights"))
    yield bench
    await bench.engine.stop()


@pytest.mark.asyncio(loop_scope="class")
class TestEmbeddedDense(EngineContract):
    model = "tiny_dense"


@pytest.mark.asyncio(loop_scope="class")
class TestEmbeddedVision(ImageContract):
    model = "tiny_vision"


@pytest.mark.asyncio(loop_scope="class")
class TestEmbeddedLlava(ImageContract):
    model = "tiny_llava"


@pytest.mark.asyncio(loop_scope="class")
class TestEmbeddedMoe(EngineContract):
    model = "tiny_moe"

    async def test_routes_are_those_of_a_full_forward(self, bench: Bench) -> None:
        result = await bench.generate(PROMPT, sampling())
        ids = [*PROMPT, *result.token_ids.tolist()]
        assert result.routed_experts is not None and result.routed_experts.dtype == np.int16
        assert result.routed_experts.shape == (len(ids) - 1, 2, 2)
        with torch.no_grad():
            logits = bench.model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1).numpy()
        agree = (np.sort(result.routed_experts, -1) == np.sort(expected, -1)).all(-1)
        assert agree.all()

    async def test_a_later_turn_tells_only_the_routes_that_it_is_asked_for(self, bench: Bench) -> None:
        first = await bench.generate(PROMPT, sampling())
        ids = [*PROMPT, *first.token_ids.tolist(), 7, 9]
        turns = [await bench.generate(ids, sampling(routes_from=start)) for start in (0, len(PROMPT) + 23)]
        whole, later = (turn.routed_experts for turn in turns)
        assert [turn.routes_from for turn in turns] == [0, len(PROMPT) + 23]
        assert whole is not None and later is not None and later.shape == (26, 2, 2)
        assert (np.sort(later, -1) == np.sort(whole[len(PROMPT) + 23 :], -1)).all()


async def test_kept_cache_entries_are_told_by_their_version(tiny_dense: Path, tmp_path: Path) -> None:
    bench = await started(tiny_dense, tmp_path, kv_on_refit="keep")
    running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=200)))
    await wait_for_tokens(bench, 5)
    await bench.refit(seed=1)
    held = await running
    fresh = await bench.generate(PROMPT, sampling())
    await bench.engine.stop()
    assert set(held.policy_versions.tolist()) == {0, 1}
    assert set(held.kv_versions.tolist()) == {0}  # new tokens attended to entries of version 0
    assert set(fresh.kv_versions.tolist()) == {1}
    assert np.abs(fresh.logprobs - bench.logprobs(PROMPT, fresh.token_ids, 1.0)).max() < TOLERANCE


async def test_more_requests_than_slots_wait_their_turn(tiny_dense: Path, tmp_path: Path) -> None:
    bench = await started(tiny_dense, tmp_path, max_num_seqs=3)
    results = await asyncio.gather(*(bench.generate([*PROMPT, index], sampling(seed=index)) for index in range(10)))
    await bench.engine.stop()
    for index, result in enumerate(results):
        assert np.abs(result.logprobs - bench.logprobs([*PROMPT, index], result.token_ids, 1.0)).max() < TOLERANCE


async def test_a_next_turn_reuses_what_its_prompt_shares_with_a_free_slot(tiny_dense: Path, tmp_path: Path) -> None:
    bench = await started(tiny_dense, tmp_path)
    first = await bench.generate(PROMPT, sampling())
    longer = [*PROMPT, *first.token_ids.tolist(), 8, 9, 10]
    second = await bench.generate(longer, sampling())
    other = await bench.generate([*longer[:20], 77, 78], sampling())
    await bench.engine.stop()
    assert np.abs(second.logprobs - bench.logprobs(longer, second.token_ids, 1.0)).max() < TOLERANCE
    assert np.abs(other.logprobs - bench.logprobs([*longer[:20], 77, 78], other.token_ids, 1.0)).max() < TOLERANCE


async def test_stop_ends_requests_as_abort(tiny_dense: Path, tmp_path: Path) -> None:
    bench = await started(tiny_dense, tmp_path)
    running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=400)))
    await wait_for_tokens(bench, 3)
    await bench.engine.stop()
    assert (await running).finish_reason == "abort"


async def test_asyncio_stays_alive_while_it_generates(tiny_dense: Path, tmp_path: Path) -> None:
    bench = await started(tiny_dense, tmp_path)
    running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=400)))
    beats = 0
    while not running.done():
        await asyncio.sleep(0)
        beats += 1
    await bench.engine.stop()
    assert beats > 50


async def test_a_tied_head_is_sent_once(tiny_dense: Path, tmp_path: Path) -> None:
    bench = await started(tiny_dense, tmp_path)
    await bench.engine.stop()
    source = write_weights(named_weights(bench.model), policy_version=1, folder=tmp_path)
    assert "lm_head.weight" not in source.digests and "model.embed_tokens.weight" in source.digests
