"""The two sides of parity: a real engine that samples, and the trainer's own scorer over the same ids.

sample: engine started, all prompts at once, stopped again         --> one Sample for each call
Trainer.score: samples packed as a step packs them, live or replay --> log-probs in the order of the samples, counts of routes
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from molt import environ
from molt.config import Config
from molt.data.processor import PlacedImage
from molt.errors import LineageError
from molt.learn.alone import alone
from molt.learn.model import load_model
from molt.learn.packing import RowImages, pack
from molt.learn.policy import Policy
from molt.learn.routes import RouteCounts, Routes, add_counts
from molt.parity.prompts import Asked
from molt.rollout.engine import Sampling
from molt.rollout.spec import engine_specs, make_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of the engine."""

    token_ids: np.ndarray
    """(P + N,) int32: prompt, then sampled ids."""
    num_prompt: int
    logprobs: np.ndarray
    """(N,) float32: as the engine says."""
    routes: np.ndarray | None
    """(P + N - 1, L, K) int16 by absolute position."""
    images: tuple[PlacedImage, ...] = ()

    @property
    def is_sampled(self) -> np.ndarray:
        """(P + N,) bool."""
        return np.arange(len(self.token_ids)) >= self.num_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the trainer says of some samples."""

    logprobs: np.ndarray
    """(sum of N,) float32, in the order of the samples."""
    counts: list[RouteCounts]
    """Of each layer with experts; empty for a dense model."""


async def sample(config: Config, prompts: Sequence[Asked], *, num_samples: int, quantization: str | None = None) -> list[Sample]:
    """Every prompt num_samples times, with fixed seeds. The engine runs in this process and is gone afterwards."""
    spec = engine_specs(config)[0]
    if quantization is not None:
        spec = replace(spec, options={**spec.options, "quantization": quantization})
    for name, value in spec.env.items():
        environ.force(name, value)
    engine = make_engine(spec)
    await engine.start()
    places = asyncio.Semaphore(config.rollout.max_concurrency)

    async def call(number: int) -> Sample:
        prompt = prompts[number // num_samples]
        shown = [placed.expansion.image for placed in prompt.images]
        sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature, seed=number)
        async with places:
            async with asyncio.timeout(spec.request_timeout_s):
                found = await engine.generate(f"parity-{number}", prompt.sent, sampling, shown)
        if found.prompt_ids is not None and not np.array_equal(found.prompt_ids, prompt.token_ids):
            raise LineageError(
                f"call {number}: the engine consumed {len(found.prompt_ids)} prompt ids, not the {len(prompt.token_ids)} meant"
            )
        return Sample(
            token_ids=np.concatenate([prompt.token_ids, found.token_ids]),
            num_prompt=len(prompt.token_ids),
            logprobs=found.logprobs,
            routes=found.routed_experts,
            images=prompt.images,
        )

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(number)) for number in range(len(prompts) * num_samples)]
        return [task.result() for task in tasks]
    finally:
        await engine.stop()


class Trainer:
    """The trainer's policy in this process, for scoring alone."""

    def __init__(self, config: Config, policy: Policy, routes: Routes | None) -> None:
        self._config = config
        self._policy = policy
        self._routes = routes

    def score(self, samples: Sequence[Sample], *, is_replayed: bool) -> Scored:
        """Log-probs of all sampled tokens. is_replayed: with the engine's routes; else with live ones, which are only compared."""
        if self._routes is not None:
            self._routes.observe(is_replayed=is_replayed)
            for number, item in enumerate(samples):
                if item.routes is None:
                    raise LineageError(f"call {number}: the engine gave no routed experts; nothing can be replayed or compared")
                self._routes.check(item.routes, f"call {number}")
        temperature = self._config.rollout.temperature
        parts, counts = [], []
        for batch in batches(samples, self._config.train.micro_batch_tokens):
            packed = pack(
                [item.token_ids for item in batch],
                [item.is_sampled for item in batch],
                [temperature] * len(batch),
                None if self._routes is None else [item.routes for item in batch],
                [RowImages.of(item.images, len(item.token_ids)) for item in batch],
            )
            parts.append(self._policy.score(packed)[0].float().cpu().numpy())
            if self._routes is not None:
                counts.append(self._routes.take_counts())
        return Scored(logprobs=np.concatenate(parts), counts=add_counts(counts) if counts else [])


@contextmanager
def trainer(config: Config, *, is_moe: bool) -> Iterator[Trainer]:
    """The policy as one rank would hold it, sharded over this process alone, in the precision of the settings."""
    with alone() as mesh:
        scorer = load_model(str(config.actor.model_name_or_path), config.actor, config.fsdp)
        routes = Routes.install(scorer.lm, setting="--variants moe") if is_moe else None
        policy = Policy(scorer, config.actor, config.fsdp, mesh=mesh, num_steps=1)
        scorer.routes = routes
        yield Trainer(config, policy, routes)


def batches(samples: Sequence[Sample], most: int) -> Iterator[list[Sample]]:
    """Neighbours together, as many as fit into `most` tokens; a longer one alone."""
    held: list[Sample] = []
    size = 0
    for item in samples:
        if held and size + len(item.token_ids) > most:
            yield held
            held, size = [], 0
        held.append(item)
        size += len(item.token_ids)
    if held:
        yield held
