"""Do routes survive a preemption and the prefix cache: the same tokens again without either, and how far their experts agree.

python -m tools.device.routes FILE.json     (one vLLM engine in this process; prints one JSON line)

Routes of a decoded token and of the same token in a prefill differ where two experts are nearly equal, since kernels sum in another
order; `quiet`, calls that nothing disturbed, says how often. A row that was lost, shifted or of another request would agree by chance.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 120.0


def agreement(found: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> dict[str, float]:
    """Share of experts in common over all tokens and layers, that of the worst call, and of tokens with the same experts everywhere."""
    shares, calls, same, missing = [], [], [], 0
    for one, other in zip(found, again, strict=True):
        count = min(len(one), len(other))
        common = (one[:count, :, :, None] == other[:count, :, None, :]).any(-1)  # (tokens, layers, experts of a token)
        shares.append(common.mean(-1).ravel())
        calls.append(float(common.mean()))
        same.append(common.all((1, 2)))
        missing += int((one < 0).any((1, 2)).sum())
    return {
        "mean": float(np.concatenate(shares).mean()),
        "worst_call": min(calls),
        "same_tokens": float(np.concatenate(same).mean()),
        "num_tokens": sum(map(len, found)),
        "num_missing": missing,
    }


class Bench:
    """One engine with a small cache that counts what it does."""

    def __init__(self, engine: Any, vocab_size: int, sizes: dict[str, int]) -> None:
        self.engine = engine
        self.sizes = sizes
        self.generator = np.random.default_rng(0)
        self.vocab_size = vocab_size
        self.num_calls = 0

    def prompt(self) -> list[int]:
        """Ids that no other prompt begins with."""
        return self.generator.integers(0, self.vocab_size, self.sizes["prompt"]).tolist()

    async def call(self, ids: Sequence[int], count: int, routes_from: int = 0) -> Any:
        """One call with a seed of its own."""
        from molt.rollout.engine import Sampling

        self.num_calls += 1
        sampling = Sampling(max_new_tokens=count, temperature=1.0, seed=self.num_calls, routes_from=routes_from)
        return await asyncio.wait_for(self.engine.generate(f"routes-{self.num_calls}", list(ids), sampling), LIMIT_S)

    async def forget(self) -> None:
        """Drop the prefix cache."""
        await self.engine._llm.reset_prefix_cache()

    async def again(self, ids: Sequence[int]) -> np.ndarray:
        """Routes of ids as one prompt that nothing was cached of."""
        return (await self.call(ids, 1)).routed_experts[: len(ids)]

    async def crowd(self, num_calls: int) -> dict[str, Any]:
        """Calls at once, then the same tokens as prompts, few at a time."""
        prompts = [self.prompt() for _ in range(num_calls)]
        before = self.engine.counts.num_preemptions
        done = await asyncio.gather(*(self.call(ids, self.sizes["answer"]) for ids in prompts))
        num_preemptions = self.engine.counts.num_preemptions - before
        await self.forget()
        found_before = self.engine.counts.n_prefix_found
        whole = [[*ids, *one.token_ids[:-1].tolist()] for ids, one in zip(prompts, done, strict=True)]
        places = asyncio.Semaphore(2)

        async def one_of(ids: Sequence[int]) -> np.ndarray:
            async with places:
                return await self.again(ids)

        again = await asyncio.gather(*(one_of(ids) for ids in whole))
        await self.forget()
        return {
            "num_calls": num_calls,
            "num_preemptions": num_preemptions,
            "n_cached_again": self.engine.counts.n_prefix_found - found_before,
            **agreement([one.routed_experts for one in done], again),
        }

    async def cached(self) -> dict[str, Any]:
        """A prompt, the next turn on top of its answer, and that turn again without the cache."""
        counts = self.engine.counts
        first_ids = [*self.prompt(), *self.prompt()]
        first = await self.call(first_ids, self.sizes["answer"])
        next_ids = [*first_ids, *first.token_ids.tolist(), *self.prompt()]
        before = counts.n_prefix_found
        turn = await self.call(next_ids, 8)
        n_found = counts.n_prefix_found - before
        start = len(first_ids) + len(first.token_ids) - 1
        later = await self.call(next_ids, 8, routes_from=start)
        await self.forget()
        before = counts.n_prefix_found
        again = await self.again(next_ids)
        known = min(n_found, len(first.routed_experts))
        return {
            "n_found": n_found,
            "n_found_again": counts.n_prefix_found - before,
            # What the cache holds was computed once, so its rows are the very rows of the call that computed it.
            "equal_to_first": float((turn.routed_experts[:known] == first.routed_experts[:known]).all((1, 2)).mean()) if known else None,
            # A turn that asks only for what no earlier one told gets the same rows from there on.
            "later_rows": agreement([later.routed_experts[: len(next_ids) - start]], [turn.routed_experts[start : len(next_ids)]]),
            **agreement([turn.routed_experts[: len(next_ids)]], [again]),
        }


async def measure(file: Path) -> dict[str, Any]:
    """All three: quiet calls, preempted calls, a cached prefix."""
    from molt.config import Config
    from molt.rollout.spec import engine_specs, make_engine

    known = json.loads(file.read_text())
    spec = engine_specs(Config.model_validate_json(known["config"]))[0]
    os.environ.update(spec.env)
    engine: Any = make_engine(replace(spec, options={**spec.options, "is_counted": True}))
    engine._arguments["num_gpu_blocks_override"] = known["num_blocks"]
    info = await engine.start()
    bench = Bench(engine, info.vocab_size, known["sizes"])
    try:
        facts: dict[str, Any] = {"quiet": await bench.crowd(known["num_quiet"]), "preempted": await bench.crowd(known["num_calls"])}
        is_cached = engine._arguments["enable_prefix_caching"]
        facts["cached"] = await bench.cached() if is_cached else "this engine captures routes without a prefix cache"
        return facts
    finally:
        await engine.stop()


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(measure(Path(sys.argv[1])))), flush=True)
