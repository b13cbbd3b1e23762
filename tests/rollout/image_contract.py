"""What an engine must do with images, as tests that the test classes of engines inherit. The reference is the model's own forward pass
over expanded ids and the processor's tensors."""

from __future__ import annotations

import asyncio

import numpy as np
import PIL.Image
import pytest
import torch

from molt.data.images import Image
from molt.data.processor import ImageProcessor, named_tensors
from molt.errors import EngineError
from molt.rollout.engine import Generation
from molt.rollout.vision import FAMILIES
from molt.rollout.weights import write_weights
from tests.rollout.engine_contract import LIMIT_S, TOLERANCE, Bench, sampling, wait_for_tokens


def noise(seed: int, size: tuple[int, int] = (40, 24)) -> Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    return Image.of(PIL.Image.fromarray(pixels))


class ImageContract:
    """Inherit, name a model that takes images, and give a class-scoped fixture `bench`."""

    async def ask(self, bench: Bench, ids: list[int], images: list[Image], **changes: object) -> Generation:
        bench.num_requests += 1
        call = bench.engine.generate(f"image-{bench.num_requests}", ids, sampling(**changes), images)
        return await asyncio.wait_for(call, LIMIT_S)

    @torch.no_grad()
    def reference(self, bench: Bench, processor: ImageProcessor, ids: list[int], images: list[Image], token_ids: np.ndarray) -> np.ndarray:
        """Log-probs of sampled ids by transformers' own forward pass. A sampled placeholder would be taken for an image there."""
        whole, placed = processor.expand(np.array(ids, np.int32), images)
        tensors = named_tensors(image.expansion.tensors() for image in placed)
        has_prompt_axis = FAMILIES[bench.model.config.model_type].has_prompt_axis
        shown = np.where(token_ids == processor.placeholder_id, 0, token_ids)
        given = torch.tensor(np.concatenate([whole, shown])[None].astype(np.int64))
        shown_as = {name: torch.tensor(value[None] if has_prompt_axis else value) for name, value in tensors.items()}
        logits = bench.model(input_ids=given, **shown_as).logits[0].float()
        logp = torch.log_softmax(logits[len(whole) - 1 : -1], -1)
        return logp.gather(1, torch.tensor(token_ids).long()[:, None])[:, 0].numpy()

    def gap(self, bench: Bench, processor: ImageProcessor, ids: list[int], images: list[Image], found: Generation) -> float:
        """Largest difference up to a placeholder that was sampled."""
        is_placeholder = found.token_ids == processor.placeholder_id
        num = int(np.argmax(is_placeholder)) + 1 if is_placeholder.any() else len(found.token_ids)
        expected = self.reference(bench, processor, ids, images, found.token_ids[:num])
        return float(np.abs(found.logprobs[:num] - expected).max())

    async def test_prompt_is_consumed_as_the_processor_expands_it(self, bench: Bench, processor: ImageProcessor) -> None:
        ids, images = [80, processor.placeholder_id, 81, processor.placeholder_id], [noise(0), noise(1)]
        found = await self.ask(bench, ids, images)
        assert found.prompt_ids is not None and len(found.token_ids) == 24
        assert np.array_equal(found.prompt_ids, processor.expand(np.array(ids, np.int32), images)[0])
        assert self.gap(bench, processor, ids, images, found) < TOLERANCE

    async def test_same_ids_with_another_image_are_another_prompt(self, bench: Bench, processor: ImageProcessor) -> None:
        ids = [80, processor.placeholder_id, 81, 82, 83]
        answers = [(seed, await self.ask(bench, ids, [noise(seed)], temperature=0.0)) for seed in (2, 3, 2)]
        for seed, found in answers:
            assert self.gap(bench, processor, ids, [noise(seed)], found) < TOLERANCE
        others = self.reference(bench, processor, ids, [noise(3)], answers[0][1].token_ids)
        assert float(np.abs(others - answers[0][1].logprobs).max()) > 10 * TOLERANCE  # what is shown is seen

    async def test_many_prompts_at_once_keep_their_images_apart(self, bench: Bench, processor: ImageProcessor) -> None:
        sizes = [(40, 24), (24, 40), (64, 64), (8, 8)]
        calls = [([90 + n, processor.placeholder_id, *range(10, 10 + n)], [noise(10 + n, size)]) for n, size in enumerate(sizes)]
        found = await asyncio.gather(*(self.ask(bench, ids, images, seed=n) for n, (ids, images) in enumerate(calls)))
        for (ids, images), answer in zip(calls, found, strict=True):
            assert self.gap(bench, processor, ids, images, answer) < TOLERANCE

    async def test_second_turn_may_show_another_image(self, bench: Bench, processor: ImageProcessor) -> None:
        ids, images = [80, processor.placeholder_id, 81], [noise(5)]
        first = await self.ask(bench, ids, images, max_new_tokens=6)
        said = [token for token in first.token_ids.tolist() if token != processor.placeholder_id]
        ids, images = [*ids, *said, 1, processor.placeholder_id, 2], [noise(5), noise(6)]
        second = await self.ask(bench, ids, images)
        assert second.prompt_ids is not None and first.prompt_ids is not None
        assert np.array_equal(second.prompt_ids[: len(first.prompt_ids)], first.prompt_ids)  # the first image was expanded once
        assert self.gap(bench, processor, ids, images, second) < TOLERANCE

    async def test_weights_that_see_otherwise_are_seen_with_at_once(self, bench: Bench, processor: ImageProcessor) -> None:
        """Prefix and features of an image that was shown before must both be made anew."""
        ids, images = [80, processor.placeholder_id, 81], [noise(5)]
        before = await self.ask(bench, ids, images, temperature=0.0)
        running = asyncio.create_task(self.ask(bench, ids, images, max_new_tokens=150))
        await wait_for_tokens(bench, 10)
        source = write_weights(bench.change(seed=3), policy_version=bench.version + 1, folder=bench.folder)
        await bench.engine.pause("keep")
        report = await bench.engine.refit(source)
        await bench.engine.resume()
        bench.version += 1
        assert report.caches == ("kv", "images")
        after = await self.ask(bench, ids, images, temperature=0.0)
        assert self.gap(bench, processor, ids, images, after) < TOLERANCE
        old = self.reference(bench, processor, ids, images, before.token_ids)
        assert float(np.abs(old - before.logprobs).max()) > 10 * TOLERANCE
        held = await running
        is_new = held.policy_versions == bench.version
        assert set(held.policy_versions.tolist()) == {bench.version - 1, bench.version}
        if processor.placeholder_id not in held.token_ids:  # later tokens attend to an image that was looked at again
            expected = self.reference(bench, processor, ids, images, held.token_ids)
            assert float(np.abs(held.logprobs - expected)[is_new].max()) < TOLERANCE

    async def test_number_of_images_must_be_that_of_placeholders(self, bench: Bench, processor: ImageProcessor) -> None:
        with pytest.raises(EngineError):
            await self.ask(bench, [80, processor.placeholder_id, 81], [noise(0), noise(1)])
        with pytest.raises(EngineError):
            await self.ask(bench, [80, 81], [noise(0)])
