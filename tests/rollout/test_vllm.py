"""The vLLM engine on the CPU: the contract on a dense and on an expert model, and what is its own."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import pytest_asyncio
import torch

from molt import environ
from molt.config import Config
from molt.errors import EngineError, LineageError, RefitError
from molt.rollout import vllm_calls
from molt.rollout.vision import model_class
from molt.rollout.vllm_calls import Call
from molt.rollout.vllm_engine import VllmEngine
from molt.rollout.vllm_settings import vllm_environment
from molt.rollout.weights import named_weights, write_weights
from tests.rollout.engine_contract import PROMPT, TOLERANCE, Bench, EngineContract, sampling, wait_for_tokens
from tests.rollout.image_contract import ImageContract

BREAKING = "tests.rollout.breaking_worker.BreakingExtension"
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


async def started(folder: Path, work: Path, further: Mapping[str, object] = MappingProxyType({}), **options: object) -> Bench:
    from transformers import AutoConfig

    for name, value in vllm_environment(Config(), is_cuda=False).items():
        environ.force(name, value)
    engine = VllmEngine(str(folder), max_len=448, seeds_calls=True, **options)
    engine._arguments |= further
    info = await engine.start()
    kind = model_class(AutoConfig.from_pretrained(folder))
    model = kind.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Bench(engine=engine, info=info, model=model, folder=work)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    options = getattr(request.cls, "options", {})
    bench = await started(
        request.getfixturevalue(request.cls.model), tmp_path_factory.mktemp("weights"), getattr(request.cls, "further", {}), **options
    )
    yield bench
    await bench.engine.stop()


@pytest.mark.asyncio(loop_scope="class")
class TestVllmDense(EngineContract):
    model = "tiny_dense"

    async def test_an_output_without_lineage_is_told_as_that(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(call: Call, given: object, token_ids: np.ndarray) -> np.ndarray:
            return logprobs(call, None, token_ids)

        logprobs = vllm_calls._logprobs
        monkeypatch.setattr(vllm_calls, "_logprobs", lost)
        with pytest.raises(LineageError, match="24 ids and 0 log-probs"):
            await bench.generate(PROMPT, sampling())

    async def test_no_token_comes_from_weights_that_a_refit_left_half_loaded(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=300)))
        await wait_for_tokens(bench, 4)
        ask = bench.engine._weights_of.ask

        async def lose(method: str, *args: object) -> list[dict[str, object]]:
            answers = await ask(method, *args)
            if method == "molt_load":
                raise RefitError("the worker was lost on the way back")  # as it was loaded, and as the last weights are put back
            return answers

        other = {name: tensor * 1.5 for name, tensor in named_weights(bench.model).items()}
        await bench.engine.pause("keep")
        num_before = sum(bench.engine._counts().values())
        monkeypatch.setattr(bench.engine._weights_of, "ask", lose)
        with pytest.raises(RefitError, match="lost on the way back"):
            await bench.engine.refit(write_weights(other, policy_version=bench.version + 1, folder=bench.folder))
        with pytest.raises(EngineError, match="could not be put back"):
            await bench.engine.resume()
        with pytest.raises(EngineError, match="could not be put back"):
            await bench.generate(PROMPT, sampling())
        monkeypatch.undo()
        await bench.refit(71)
        result = await running
        assert result.policy_versions.tolist() == [bench.version - 1] * num_before + [bench.version] * (300 - num_before)
        new = bench.logprobs(PROMPT, result.token_ids, 1.0)
        assert np.abs(result.logprobs - new)[num_before:].max() < TOLERANCE


@pytest.mark.asyncio(loop_scope="class")
class TestVllmMoe(EngineContract):
    model = "tiny_moe"
    options = {"capture_routes": True}

    async def test_routes_are_those_of_a_full_forward(self, bench: Bench) -> None:
        result = await bench.generate(PROMPT, sampling())
        ids = [*PROMPT, *result.token_ids.tolist()]
        assert result.routed_experts is not None and result.routed_experts.dtype == np.int16
        assert result.routed_experts.shape == (len(ids) - 1, 2, 2)
        with torch.no_grad():
            logits = bench.model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1).numpy()
        assert (np.sort(result.routed_experts, -1) == np.sort(expected, -1)).all()

    async def test_a_later_turn_tells_only_the_routes_that_it_is_asked_for(self, bench: Bench) -> None:
        first = await bench.generate(PROMPT, sampling())
        ids = [*PROMPT, *first.token_ids.tolist(), 7, 9]
        turns = [await bench.generate(ids, sampling(routes_from=start)) for start in (0, len(PROMPT) + 23)]
        whole, later = (turn.routed_experts for turn in turns)
        assert [turn.routes_from for turn in turns] == [0, len(PROMPT) + 23]
        assert whole is not None and later is not None and later.shape == (26, 2, 2)
        assert (np.sort(later, -1) == np.sort(whole[len(PROMPT) + 23 :], -1)).all()


@pytest.mark.asyncio(loop_scope="class")
class TestVllmVision(ImageContract):
    model = "tiny_vision"
    options = {"max_images": 4, "is_vision_frozen": False}

    async def test_text_alone_is_served_as_by_any_model(self, bench: Bench) -> None:
        result = await bench.generate(PROMPT, sampling())
        assert result.prompt_ids is None
        assert np.abs(result.logprobs - bench.logprobs(PROMPT, result.token_ids, 1.0)).max() < TOLERANCE

    async def test_features_of_images_are_kept_where_the_tower_is_frozen(self, bench: Bench) -> None:
        bench.engine._is_vision_frozen = True
        source = write_weights(named_weights(bench.model), policy_version=bench.version + 1, folder=bench.folder)
        await bench.engine.pause("keep")
        report = await bench.engine.refit(source)
        await bench.engine.resume()
        bench.version += 1
        assert report.caches == ("kv",)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM imports torchvision for LLaVA")
@pytest.mark.asyncio(loop_scope="class")
class TestVllmLlava(ImageContract):
    model = "tiny_llava"
    options = {"max_images": 4, "is_vision_frozen": False}


@pytest.mark.asyncio(loop_scope="class")
class TestVllmKeepsCache:
    model = "tiny_dense"
    options = {"kv_on_refit": "keep"}

    async def test_kept_cache_entries_are_told_by_their_version(self, bench: Bench) -> None:
        running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=200)))
        await wait_for_tokens(bench, 5)
        await bench.refit(seed=1)
        held = await running
        fresh = await bench.generate(PROMPT, sampling())
        assert set(held.policy_versions.tolist()) == {0, 1}
        assert set(held.kv_versions.tolist()) == {0}
        assert set(fresh.kv_versions.tolist()) == {1}
        assert np.abs(fresh.logprobs - bench.logprobs(PROMPT, fresh.token_ids, 1.0)).max() < TOLERANCE


@pytest.mark.asyncio(loop_scope="class")
class TestVllmTwoWorkers(EngineContract):
    """Each worker holds a shard of every layer, reads all weights and answers for what it was handed."""

    model = "tiny_dense"
    options = {"tensor_parallel_size": 2}


@pytest.mark.asyncio(loop_scope="class")
class TestVllmBrokenUpdates:
    """Real updates of a real model, broken in their middle; handles are read from a file, since there is no GPU."""

    model = "tiny_dense"
    further = {"worker_extension_cls": BREAKING, "weight_transfer_config": {"backend": "ipc"}}

    async def refit(self, bench: Bench, transport: str, scale: float, **digests: str) -> None:
        """A refit while paused; the reference takes the weights if the engine does."""
        tensors = {name: tensor * scale for name, tensor in named_weights(bench.model).items()}
        written = write_weights(tensors, policy_version=bench.version + 1, folder=bench.folder)
        update = base64.b64encode(pickle.dumps([{"path": written.path}])).decode()
        if transport == "ipc":
            written = replace(written, transport="ipc", digests={**written.digests, **digests}, options={"update": update})
        await bench.engine.refit(written)
        bench.version += 1
        with torch.no_grad():
            for name, parameter in bench.model.named_parameters():
                parameter.copy_(tensors[name])

    @pytest.mark.parametrize(
        ("transport", "place", "num_tensors", "is_old_whole"),
        [
            ("file", "load", 0, True),
            ("file", "load", 7, True),
            ("ipc", "start", 0, True),
            ("ipc", "load", 0, True),
            ("ipc", "load", 7, False),
            ("ipc", "finish", 0, False),
            ("ipc", "digest", 0, False),
        ],
    )
    async def test_an_update_that_breaks_off_leaves_nothing_behind(
        self, bench: Bench, transport: str, place: str, num_tensors: int, is_old_whole: bool
    ) -> None:
        await bench.engine.pause("keep")
        await bench.engine._weights_of.ask("molt_break", place, num_tensors)
        with pytest.raises(RefitError, match="norm.weight .* arrived as" if place == "digest" else f"broken in {place}"):
            await self.refit(bench, transport, 1.3, **({"model.norm.weight": "0" * 32} if place == "digest" else {}))
        if is_old_whole:
            await bench.engine.resume()
            old = await bench.generate(PROMPT, sampling())
            assert np.abs(old.logprobs - bench.logprobs(PROMPT, old.token_ids, 1.0)).max() < TOLERANCE
            assert set(old.policy_versions.tolist()) == {bench.version}
            await bench.engine.pause("keep")
        else:
            with pytest.raises(EngineError, match="it needs another one"):
                await bench.engine.resume()
        await self.refit(bench, transport, 0.9)
        await bench.engine.resume()
        new = await bench.generate(PROMPT, sampling())
        assert np.abs(new.logprobs - bench.logprobs(PROMPT, new.token_ids, 1.0)).max() < TOLERANCE
        assert set(new.policy_versions.tolist()) == {bench.version}


@pytest.mark.asyncio(loop_scope="class")
class TestVllmTwoCores(EngineContract):
    """Data-parallel cores: each holds the whole model, and requests go to either."""

    model = "tiny_dense"
    options = {"data_parallel_size": 2}
    further = {"worker_extension_cls": BREAKING}

    async def test_what_one_core_did_not_take_is_told(self, bench: Bench) -> None:
        engine = bench.engine
        await engine.pause("keep")
        told = await engine._weights_of.ask("molt_break", "load", 3, 1)
        assert [answer["index"] for answer in told] == [0, 1]
        new = {name: tensor * 1.3 for name, tensor in named_weights(bench.model).items()}
        other = write_weights(new, policy_version=bench.version + 1, folder=bench.folder)
        with pytest.raises(RefitError, match="worker 1, molt_load: RuntimeError: broken in load"):
            await engine.refit(other)
        await engine.resume()
        await self.all_agree(bench)
        await bench.refit(5)
        await self.all_agree(bench)

    async def all_agree(self, bench: Bench) -> None:
        """Every one of some calls at once has the log-probs of the weights in force, and draws numbers of its own."""
        found = await asyncio.gather(*(bench.generate(PROMPT, sampling(seed=None)) for _ in range(6)))
        for result in found:
            assert set(result.policy_versions.tolist()) == {bench.version}
            assert np.abs(result.logprobs - bench.logprobs(PROMPT, result.token_ids, 1.0)).max() < TOLERANCE
        assert len({tuple(result.token_ids) for result in found}) == 6
