"""Speculation by a draft head leaves the distribution as it is: log-probs beside a full forward, acceptance, and both again after a refit.

python -m tools.device.drafts --limit-s 150 [--rehearse] [--drafts 3]

One vLLM engine in this process on a MiMo whose head guesses right about 80 % of the time. The refit moves every tensor of the model by
noise; the draft head is not sent and stays as it was loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.device.models import make_mtp_model
from tools.device.parts import Parts, flags, parser

LIMIT_S = 120.0


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--drafts", type=int, default=3, help="tokens drafted ahead")
    drafts = Drafts(made.parse_args())
    parts = drafts.parts
    with asyncio.Runner() as runner:
        if parts.run("start", lambda facts: runner.run(drafts.start(facts)), needs_s=60):
            parts.run("before", lambda facts: runner.run(drafts.measure(facts)), needs_s=10)
            if parts.run("refit", lambda facts: runner.run(drafts.refit(facts)), needs_s=10):
                parts.run("after", lambda facts: runner.run(drafts.measure(facts)), needs_s=10)
            parts.run("end", lambda facts: runner.run(drafts.engine.stop()))
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class Drafts:
    """One engine and the model that it should follow."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_small: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.parts = Parts("drafts", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.engine: Any = None
        self.model: Any = None
        self.num_calls = 0

    async def start(self, facts: dict[str, Any]) -> None:
        """Make the model, start the engine, load the reference."""
        from transformers import AutoModelForCausalLM

        from molt.rollout.spec import engine_specs, make_engine
        from molt.settings import resolve

        small = self.is_small
        sizes = {"hidden_size": 128, "num_layers": 2, "vocab_size": 300} if small else {"hidden_size": 1024, "num_layers": 12}
        dtype = "float32" if small else "bfloat16"
        began = time.perf_counter()
        model = make_mtp_model(self.work / ("mtp-tiny" if small else "mtp-drafts"), dtype=dtype, **sizes)
        facts["model_s"] = round(time.perf_counter() - began, 1)
        own: dict[str, Any] = {
            "actor.model_name_or_path": model,
            "actor.dtype": dtype,
            "data.max_len": 448 if small else 1024,
            "vllm.engine": "vllm",
            "vllm.num_speculative_tokens": self.arguments.drafts,
            "placement.trainer": "colocated",
        }
        if not small:
            own |= {"vllm.kv_cache_space_gib": 4, "vllm.gpu_memory_utilization": 0.1, "vllm.max_num_seqs": 128, "vllm.enforce_eager": True}
        spec = engine_specs(resolve([], tuple(flags(own))))[0]
        os.environ.update(spec.env)
        self.engine = make_engine(replace(spec, options={**spec.options, "is_counted": True}))
        began = time.perf_counter()
        await self.engine.start()
        facts |= {"start_s": round(time.perf_counter() - began, 1), "num_drafted_ahead": self.arguments.drafts}
        self.model = AutoModelForCausalLM.from_pretrained(str(model), dtype=getattr(torch, dtype)).to(self.device).eval()

    async def measure(self, facts: dict[str, Any]) -> None:
        """Calls at temperature 1; their log-probs and the frequency of the likely token beside a full forward."""
        from molt.rollout.engine import Sampling

        counts = self.engine.counts
        drafted, accepted = counts.n_drafted, counts.n_accepted
        generator = np.random.default_rng(self.num_calls)
        calls = 8 if self.is_small else 128
        prompts = [generator.integers(0, self.model.config.vocab_size, 16).tolist() for _ in range(calls)]
        began = time.perf_counter()
        tasks = []
        for ids in prompts:
            self.num_calls += 1
            sampling = Sampling(max_new_tokens=200, temperature=1.0, seed=self.num_calls)
            tasks.append(self.engine.generate(f"drafts-{self.num_calls}", ids, sampling))
        done = await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
        seconds = time.perf_counter() - began
        gaps, likely, chances = [], [], []
        for ids, one in zip(prompts, done, strict=True):
            logprobs, is_likely, chance = self.reference(ids, one.token_ids)
            gaps.append(np.abs(one.logprobs - logprobs))
            likely.append(is_likely)
            chances.append(chance)
        every, share, expected = np.concatenate(gaps), np.concatenate(likely), np.concatenate(chances)
        spread = float(np.sqrt((expected * (1 - expected)).sum()) / len(expected))
        facts |= {
            "gap": {"mean": float(every.mean()), "p99": float(np.quantile(every, 0.99)), "max": float(every.max())},
            "num_tokens": len(every),
            "tokens_per_s": round(len(every) / seconds),
            "acceptance": (counts.n_accepted - accepted) / max(1, counts.n_drafted - drafted),
            "n_drafted": counts.n_drafted - drafted,
            "likely_share": float(share.mean()),
            "likely_expected": float(expected.mean()),
            "likely_deviations": float((share.mean() - expected.mean()) / spread),
        }
        limit = 1e-4 if self.is_small else 0.05
        if not every.mean() <= limit:
            raise AssertionError(f"mean gap {every.mean():.4g} is above {limit}")
        if abs(facts["likely_deviations"]) > 4:
            raise AssertionError("the likely token was sampled more or less often than the model says")

    @torch.no_grad()
    def reference(self, ids: list[int], sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probs of sampled ids by a full forward, whether each is the likeliest, and the likeliest one's probability."""
        tokens = torch.tensor([[*ids, *sampled.tolist()]], device=self.device)
        logprobs = torch.log_softmax(self.model(tokens).logits[0, len(ids) - 1 : -1].float(), -1)
        best = logprobs.max(-1)
        target = tokens[0, len(ids) :]
        return (
            logprobs.gather(1, target[:, None])[:, 0].cpu().numpy(),
            (best.indices == target).cpu().numpy(),
            best.values.exp().double().cpu().numpy(),
        )

    async def refit(self, facts: dict[str, Any]) -> None:
        """Move every tensor of the model by noise and send it; the draft head is not among them."""
        from molt.rollout.weights import named_weights, remove_weights, weights_folder, write_weights

        generator = torch.Generator(device=self.device).manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=self.device, dtype=torch.float32)
                parameter.add_((noise * 0.05 * parameter.float().abs().mean()).to(parameter.dtype))
        tensors = named_weights(self.model)
        source = write_weights(tensors, policy_version=1, folder=weights_folder("device-drafts"))
        began = time.perf_counter()
        await self.engine.pause("keep")
        report = await self.engine.refit(source)
        await self.engine.resume()
        remove_weights(source)
        facts |= {"refit_s": round(time.perf_counter() - began, 2), "num_tensors": len(tensors), "digest": report.weights_digest}
        facts["has_draft_head"] = any("mtp" in name for name in tensors)


if __name__ == "__main__":
    raise SystemExit(main())
