"""Every attention of both model seams on packed rows: does a row leak into another, how far is it from plain float32, and its speed.

python -m tools.device.attention --limit-s 200 [--rehearse] [--only hf-sdpa automodel-te]

A random model of Qwen3-0.6B's width is given rows of many lengths, end to end. Each kind runs in this process, one after the other;
Transformer Engine needs its torch extension (te_build).
"""

from __future__ import annotations

import atexit
import gc
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tools.device.parts import Parts, parser

KINDS = {
    "hf-sdpa": ("hf", "sdpa"),
    "automodel-sdpa": ("automodel", "sdpa"),
    "automodel-te": ("automodel", "te"),
    "hf-flex": ("hf", "flex"),
    "automodel-flex": ("automodel", "flex"),
}
"""actor.implementation and fsdp.attn_implementation; flex last, since it compiles."""
NUM_TIMED = 5
LEAK_LIMIT = 1e-3
"""Nats that a row may move when another changes: kernels may cut tiles elsewhere, a leak moves it by a hundred times as much."""


def main() -> int:
    """All kinds; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    arguments = made.parse_args()
    if arguments.rehearse:
        arguments.only = [name for name in arguments.only if name == "hf-sdpa"]  # the others need a GPU
    kinds = Kinds(arguments.work, is_small=arguments.rehearse)
    parts = Parts("attention", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
    if parts.run("plain", kinds.plain):
        for name in arguments.only:
            parts.run(name, lambda facts, name=name: kinds.measure(name, facts), needs_s=15)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Kinds:
    """The model and the rows that all kinds get."""

    def __init__(self, work: Path, *, is_small: bool) -> None:
        from tools.device.models import make_dense_model

        self.is_small = is_small
        self.vocab_size = 512 if is_small else 32768
        sizes = {"hidden_size": 128, "num_layers": 2, "ffn_size": 256} if is_small else {"num_layers": 12}
        self.model = make_dense_model(work / "dense-attention", vocab_size=self.vocab_size, dtype="float32", **sizes)
        generator = np.random.default_rng(0)
        lengths = [9, 2, 31, 1, 16] if is_small else [*generator.integers(16, 2048, 14).tolist(), 2, 3]
        self.ids = [generator.integers(0, self.vocab_size, length).astype(np.int32) for length in lengths]
        self.masks = [np.arange(length) >= 1 for length in lengths]

    def plain(self, facts: dict[str, Any]) -> None:
        """The Hugging Face class in float32, row by row: what every kind is compared with."""
        policy = policy_of(self.model, "hf", "sdpa", "float32")
        self.expected = np.concatenate([self._score(policy, [ids], [mask]) for ids, mask in zip(self.ids, self.masks, strict=True)])
        facts |= {"num_rows": len(self.ids), "num_tokens": sum(map(len, self.ids)), "longest": max(map(len, self.ids))}

    def measure(self, name: str, facts: dict[str, Any]) -> None:
        """One kind: distance of packed rows from plain ones, from the same rows alone, and of one row when another changes."""
        import torch

        implementation, attention = KINDS[name]
        policy = policy_of(self.model, implementation, attention, "float32" if self.is_small else "bfloat16")
        packed = self._score(policy, self.ids, self.masks)
        alone = np.concatenate([self._score(policy, [ids], [mask]) for ids, mask in zip(self.ids, self.masks, strict=True)])
        changed = [ids.copy() for ids in self.ids]
        changed[2] = (changed[2] + 1) % self.vocab_size
        other = self._score(policy, changed, self.masks)
        row_N = np.repeat(np.arange(len(self.ids)), [int(mask.sum()) for mask in self.masks])
        facts |= {
            "mean_from_plain": float(np.abs(packed - self.expected).mean()),
            "mean_alone_from_plain": float(np.abs(alone - self.expected).mean()),
            "mean_packed_from_alone": float(np.abs(packed - alone).mean()),
            "leak_max": float(np.abs(packed - other)[row_N != 2].max()),
            "changed_row_max": float(np.abs(packed - other)[row_N == 2].max()),
            "step_ms": self._time(policy),
        }
        if torch.cuda.is_available():
            facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if facts["leak_max"] > LEAK_LIMIT:
            raise AssertionError(f"a row changes when another does: {facts}")

    def _score(self, policy: Any, ids: list[np.ndarray], masks: list[np.ndarray]) -> np.ndarray:
        """(N,) log-probs of the tokens that count, nats; none of a row of one token."""
        import torch

        from molt.learn.packing import pack

        if not any(mask.any() for mask in masks):
            return np.zeros(0, np.float32)
        with torch.no_grad():
            return policy.scorer(pack(ids, masks).to(policy.device))[0].float().cpu().numpy()

    def _time(self, policy: Any) -> float:
        """Milliseconds of a forward and backward pass over all rows, packed."""
        import torch

        from molt.learn.packing import pack

        packed = pack(self.ids, self.masks).to(policy.device)
        began = 0.0
        for number in range(NUM_TIMED + 2):
            if number == 2:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                began = time.perf_counter()
            policy.scorer(packed)[0].mean().backward()
            policy.optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began) / NUM_TIMED


def policy_of(model: Path, implementation: str, attention: str, dtype: str) -> Any:
    """The policy of one process with a model; what was on the card before is let go."""
    import torch

    from molt.config import Config
    from molt.learn.model import load_model
    from molt.learn.policy import Policy

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    actor = {"model_name_or_path": str(model), "implementation": implementation, "dtype": dtype}
    config = Config.model_validate({"actor": actor, "fsdp": {"attn_implementation": attention}})
    scorer = load_model(str(model), config.actor, config.fsdp, is_deferred=True)
    return Policy(scorer, config.actor, config.fsdp, mesh=_mesh(), num_steps=1)


@cache
def _mesh() -> Any:
    """Of a process alone, for the whole program."""
    from molt.learn.alone import alone

    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(alone())


if __name__ == "__main__":
    raise SystemExit(main())
