"""What every engine must do, as tests that each engine's test class inherits.

A bench holds one running engine, the Hugging Face model whose weights it serves now (the reference), and its version.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from molt.errors import EngineError, RefitError
from molt.rollout.engine import Engine, EngineInfo, FinishReason, Generation, Sampling
from molt.rollout.weights import digest_tensors, model_digest, named_weights, write_weights

PROMPT = [5, 17, 42, 7, 99, 3, 250, 31]
TOLERANCE = 1e-4
LIMIT_S = 60.0


@dataclass
class Bench:
    """One engine under test."""

    engine: Engine
    info: EngineInfo
    model: torch.nn.Module
    """The reference: same weights as the engine."""
    folder: Path
    version: int = 0
    num_requests: int = 0

    async def generate(self, prompt: list[int], sampling: Sampling, request_id: str | None = None) -> Generation:
        self.num_requests += 1
        name = request_id or f"request-{self.num_requests}"
        return await asyncio.wait_for(self.engine.generate(name, prompt, sampling), LIMIT_S)

    def change(self, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
        """Change the reference by noise; returns its tensors under checkpoint names."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.abs().mean())
        return named_weights(self.model)

    async def refit(self, seed: int) -> None:
        """Give the engine new weights, and the reference the same."""
        source = write_weights(self.change(seed), policy_version=self.version + 1, folder=self.folder)
        await self.engine.pause("keep")
        report = await self.engine.refit(source)
        await self.engine.resume()
        self.version += 1
        assert report.policy_version == self.version

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Reference logits (len(ids), V)."""
        return self.model(torch.tensor([ids])).logits[0].float()

    def logprobs(self, prompt: list[int], token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Reference log-probs of sampled ids."""
        logits = self.logits([*prompt, *token_ids.tolist()])[len(prompt) - 1 : -1]
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(token_ids).long()[:, None])[:, 0].numpy()


def sampling(**changes: object) -> Sampling:
    return replace(Sampling(max_new_tokens=24, temperature=1.0, seed=11), **changes)


async def wait_for_tokens(bench: Bench, num: int) -> None:
    """Until the engine has sampled so many tokens more."""
    start = bench.engine.num_sampled
    for _ in range(6000):
        if bench.engine.num_sampled - start >= num:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"the engine sampled fewer than {num} tokens")


class EngineContract:
    """Inherit, and give a class-scoped fixture `bench`."""

    async def test_every_per_token_column_is_as_long_as_the_ids(self, bench: Bench) -> None:
        result = await bench.generate(PROMPT, sampling())
        assert result.token_ids.dtype == np.int32 and result.logprobs.dtype == np.float32
        assert len(result.token_ids) == 24 and result.finish_reason is FinishReason.LENGTH
        assert len(result.logprobs) == len(result.policy_versions) == len(result.kv_versions) == 24
        assert set(result.policy_versions.tolist()) == set(result.kv_versions.tolist()) == {bench.version}
        assert np.isfinite(result.logprobs).all() and (result.logprobs <= 0).all()

    async def test_greedy_ids_are_those_of_a_full_forward(self, bench: Bench) -> None:
        result = await bench.generate(PROMPT, sampling(temperature=0.0))
        logits = bench.logits([*PROMPT, *result.token_ids.tolist()])[len(PROMPT) - 1 : -1]
        assert logits.argmax(-1).tolist() == result.token_ids.tolist()

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
    async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(self, bench: Bench, temperature: float) -> None:
        result = await bench.generate(PROMPT, sampling(temperature=temperature))
        expected = bench.logprobs(PROMPT, result.token_ids, temperature)
        assert np.abs(result.logprobs - expected).max() < TOLERANCE

    async def test_logprobs_under_top_k_and_top_p_are_over_what_survives(self, bench: Bench) -> None:
        result = await bench.generate(PROMPT, sampling(top_k=12, top_p=0.9, temperature=0.8))
        logits = bench.logits([*PROMPT, *result.token_ids.tolist()])[len(PROMPT) - 1 : -1] / 0.8
        for row, token, logprob in zip(logits, result.token_ids.tolist(), result.logprobs.tolist(), strict=True):
            top = row.topk(12)
            probs = top.values.softmax(-1)
            num_kept = int((probs.cumsum(-1) - probs < 0.9).sum())
            kept = top.indices[:num_kept].tolist()
            assert token in kept
            expected = torch.log_softmax(top.values[:num_kept], -1)[kept.index(token)].item()
            assert logprob == pytest.approx(expected, abs=TOLERANCE)

    async def test_a_stop_id_ends_the_call_and_is_kept(self, bench: Bench) -> None:
        free = await bench.generate(PROMPT, sampling())
        stop = int(free.token_ids[9])
        first = free.token_ids.tolist().index(stop)
        result = await bench.generate(PROMPT, sampling(stop_token_ids=(stop,)))
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
        assert np.abs(result.logprobs - free.logprobs[: first + 1]).max() < TOLERANCE

    async def test_the_context_ends_a_call_by_length(self, bench: Bench) -> None:
        prompt = [int(token) for token in np.arange(bench.info.max_len - 5) % 200]
        result = await bench.generate(prompt, sampling(max_new_tokens=50))
        assert result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == 5

    @pytest.mark.parametrize("kind", ["empty", "too long", "no such id"])
    async def test_a_request_that_cannot_be_served_is_an_engine_error(self, bench: Bench, kind: str) -> None:
        prompt = {"empty": [], "too long": [1] * bench.info.max_len, "no such id": [1, bench.info.vocab_size]}[kind]
        with pytest.raises(EngineError):
            await bench.generate(prompt, sampling())

    async def test_an_abort_returns_the_tokens_sampled_so_far(self, bench: Bench) -> None:
        running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=400), "to abort"))
        await wait_for_tokens(bench, 5)
        await bench.engine.abort("to abort")
        result = await running
        assert result.finish_reason is FinishReason.ABORT
        assert 0 < len(result.token_ids) < 400
        assert len(result.token_ids) == len(result.logprobs) == len(result.policy_versions) == len(result.kv_versions)
        assert np.abs(result.logprobs - bench.logprobs(PROMPT, result.token_ids, 1.0)).max() < TOLERANCE

    async def test_an_abort_before_the_first_token_returns_none(self, bench: Bench) -> None:
        await bench.engine.pause("keep")
        running = asyncio.create_task(bench.generate(PROMPT, sampling(), "never began"))
        await asyncio.sleep(0.2)
        await bench.engine.abort("never began")
        result = await running
        await bench.engine.resume()
        assert result.finish_reason is FinishReason.ABORT
        assert len(result.token_ids) == len(result.logprobs) == len(result.policy_versions) == 0

    async def test_a_retried_request_joins_the_running_one(self, bench: Bench) -> None:
        start = bench.engine.num_sampled
        first, second = await asyncio.gather(
            bench.generate(PROMPT, sampling(max_new_tokens=60), "twice"), bench.generate(PROMPT, sampling(max_new_tokens=60), "twice")
        )
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert bench.engine.num_sampled - start == 60

    async def test_equal_seeds_repeat_and_other_seeds_differ(self, bench: Bench) -> None:
        alone = await bench.generate(PROMPT, sampling(seed=7))
        crowd = await asyncio.gather(*(bench.generate(PROMPT, sampling(seed=seed)) for seed in (1, 7, 3, 4)))
        assert crowd[1].token_ids.tolist() == alone.token_ids.tolist()
        assert len({tuple(item.token_ids.tolist()) for item in crowd}) == 4

    async def test_a_pause_keeps_requests_and_changes_none_of_their_tokens(self, bench: Bench) -> None:
        plain = await bench.generate(PROMPT, sampling(max_new_tokens=200))
        running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=200)))
        await wait_for_tokens(bench, 5)
        assert await bench.engine.pause("keep") == 1
        before = bench.engine.num_sampled
        await asyncio.sleep(0.3)
        assert bench.engine.num_sampled == before and not running.done()
        await bench.engine.resume()
        held = await running
        assert held.token_ids.tolist() == plain.token_ids.tolist()
        assert held.finish_reason is FinishReason.LENGTH

    async def test_a_pause_by_abort_ends_requests_with_their_tokens(self, bench: Bench) -> None:
        running = asyncio.create_task(bench.generate(PROMPT, sampling(max_new_tokens=400)))
        await wait_for_tokens(bench, 5)
        await bench.engine.pause("abort")
        result = await asyncio.wait_for(running, LIMIT_S)
        await bench.engine.resume()
        assert result.finish_reason is FinishReason.ABORT and 0 < len(result.token_ids) < 400

    async def test_a_refit_needs_a_pause(self, bench: Bench) -> None:
        source = write_weights(named_weights(bench.model), policy_version=bench.version + 1, folder=bench.folder)
        with pytest.raises(EngineError, match="pause"):
            await bench.engine.refit(source)
        assert (await bench.generate(PROMPT, sampling())).policy_versions.tolist() == [bench.version] * 24

    async def test_a_refit_changes_logprobs_version_and_digest(self, bench: Bench) -> None:
        old = await bench.generate(PROMPT, sampling(temperature=0.0))
        await bench.refit(seed=1)
        new = await bench.generate(PROMPT, sampling())
        assert set(new.policy_versions.tolist()) == set(new.kv_versions.tolist()) == {bench.version}
        assert np.abs(new.logprobs - bench.logprobs(PROMPT, new.token_ids, 1.0)).max() < TOLERANCE
        assert np.abs(old.logprobs - bench.logprobs(PROMPT, old.token_ids, 1.0)).max() > 100 * TOLERANCE
        assert await bench.engine.weights_digest() == model_digest(digest_tensors(named_weights(bench.model)))

    async def test_a_refit_that_changes_nothing_arrives_all_the_same(self, bench: Bench) -> None:
        # A step below the precision of what is sent: the version moves, weights and tokens stay.
        digest, before = await bench.engine.weights_digest(), await bench.generate(PROMPT, sampling(seed=3))
        source = write_weights(bench.change(seed=0, scale=0.0), policy_version=bench.version + 1, folder=bench.folder)
        await bench.engine.pause("keep")
        report = await bench.engine.refit(source)
        await bench.engine.resume()
        bench.version += 1
        after = await bench.generate(PROMPT, sampling(seed=3))
        assert report.policy_version == bench.version and report.weights_digest == digest == await bench.engine.weights_digest()
        assert after.token_ids.tolist() == before.token_ids.tolist() and set(after.policy_versions.tolist()) == {bench.version}

    async def test_cached_prefixes_of_old_weights_are_not_used_after_a_refit(self, bench: Bench) -> None:
        prompt = [int(token) for token in (np.arange(150) * 7) % 200]
        for _ in range(2):
            await bench.generate(prompt, sampling())
        await bench.refit(seed=2)
        result = await bench.generate(prompt, sampling())
        assert np.abs(result.logprobs - bench.logprobs(prompt, result.token_ids, 1.0)).max() < TOLERANCE

    async def test_versions_split_exactly_where_the_weights_changed(self, bench: Bench) -> None:
        # Each token's log-prob is a fingerprint of the weights that sampled it: it must be that of the version it carries.
        requests = [asyncio.create_task(bench.generate([*PROMPT, index], sampling(max_new_tokens=300, seed=index))) for index in range(4)]
        await wait_for_tokens(bench, 40)
        first = bench.version
        tables: dict[int, dict[int, np.ndarray]] = {}
        for seed in (3, 4):
            tables[bench.version] = {}
            snapshot = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
            await bench.refit(seed)
            tables[bench.version - 1] = snapshot
            await wait_for_tokens(bench, 40)
        results = await asyncio.gather(*requests)
        tables[bench.version] = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
        for index, result in enumerate(results):
            versions = result.policy_versions
            assert (np.diff(versions) >= 0).all() and set(versions.tolist()) == {first, first + 1, first + 2}
            for version, state in tables.items():
                bench.model.load_state_dict(state)
                expected = bench.logprobs([*PROMPT, index], result.token_ids, 1.0)
                gap = np.abs(result.logprobs - expected)
                assert gap[versions == version].max() < TOLERANCE
                assert gap[versions != version].max() > 100 * TOLERANCE
            assert (result.kv_versions == versions).all()

    @pytest.mark.parametrize("damage", ["digest", "missing", "shape", "truncated", "gone"])
    async def test_bad_weights_are_refused_and_the_old_version_serves_on(self, bench: Bench, damage: str) -> None:
        probe = await bench.generate(PROMPT, sampling())
        digest = await bench.engine.weights_digest()
        state = {name: tensor.clone() for name, tensor in named_weights(bench.model).items()}
        name = next(key for key in state if key.endswith("down_proj.weight"))
        if damage == "missing":
            del state[name]
        elif damage == "shape":
            state[name] = torch.zeros(3, 3)
        else:
            state[name] += 1.0
        source = write_weights(state, policy_version=bench.version + 1, folder=bench.folder)
        path = Path(source.path or "")
        if damage == "digest":
            source = replace(source, digests={**source.digests, name: "0" * 32})
        elif damage == "truncated":
            path.write_bytes(path.read_bytes()[:-100])
        elif damage == "gone":
            path.unlink()
        await bench.engine.pause("keep")
        with pytest.raises(RefitError):
            await bench.engine.refit(source)
        await bench.engine.resume()
        after = await bench.generate(PROMPT, sampling())
        assert after.token_ids.tolist() == probe.token_ids.tolist()
        assert after.policy_versions.tolist() == [bench.version] * 24
        assert np.abs(after.logprobs - probe.logprobs).max() < TOLERANCE
        assert await bench.engine.weights_digest() == digest
