"""What one engine must do on the card: log-probs as Hugging Face gives them, versions that change in the middle of calls, refit times."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from molt.config import Config
from molt.rollout.engine import Generation, Sampling
from molt.rollout.engine_actor import EngineHandle, launch_engine
from molt.rollout.spec import engine_specs
from molt.rollout.weights import named_weights, weights_folder, write_weights

LIMIT_S = 240.0


class Bench:
    """One engine in an actor and the Hugging Face models of every version that it served."""

    def __init__(self, config: Config, *, device: str, num_calls: int) -> None:
        self.config = config
        self.device = device
        self.num_calls = num_calls
        self.handle: EngineHandle | None = None
        self.models: list[torch.nn.Module] = []
        """By version."""
        self.offers: list[Any] = []
        self.num_requests = 0
        path = str(config.actor.model_name_or_path)
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        lines = Path(str(config.data.prompt_dataset)).read_text().splitlines()[:num_calls]
        import json

        questions = [json.loads(line)["input"] for line in lines]
        self.prompts = [self._ids(question) for question in questions]

    def _ids(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def engine(self) -> EngineHandle:
        """The engine."""
        assert self.handle is not None, "start comes first"
        return self.handle

    async def start(self, facts: dict[str, Any]) -> None:
        """Start the engine and load the reference."""
        from transformers import AutoModelForCausalLM

        began = time.perf_counter()
        spec = engine_specs(self.config)[0]
        if self.device == "cuda":
            from dataclasses import replace

            spec = replace(spec, num_gpus=0.5)
        self.handle = launch_engine(spec)
        info = await self.engine.start()
        facts |= {"kind": info.kind, "start_s": round(time.perf_counter() - began, 1)}
        dtype = torch.bfloat16 if self.config.actor.dtype == "bfloat16" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(str(self.config.actor.model_name_or_path), dtype=dtype).to(self.device).eval()
        self.models = [model]

    async def generate(self, *, max_new_tokens: int) -> list[Generation]:
        """One call for each prompt, all at once."""
        calls = []
        for number, prompt in enumerate(self.prompts):
            self.num_requests += 1
            sampling = Sampling(max_new_tokens=max_new_tokens, temperature=1.0, seed=1000 * self.num_requests + number)
            calls.append(self.engine.generate(f"call-{self.num_requests}", prompt, sampling))
        return list(await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S))

    @torch.no_grad()
    def expected(self, version: int, prompt: list[int], generation: Generation) -> np.ndarray:
        """Log-probs of the sampled ids under one version's model."""
        ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]], device=self.device)
        logits = self.models[version](ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = ids[0, len(prompt) :, None]
        return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].cpu().numpy()

    def gap(self, generations: list[Generation]) -> dict[str, float]:
        """Difference per token between the engine and the model of that token's version."""
        gaps = []
        for prompt, generation in zip(self.prompts, generations, strict=True):
            for version in np.unique(generation.policy_versions):
                mask = generation.policy_versions == version
                gaps.append(np.abs(generation.logprobs[mask] - self.expected(int(version), prompt, generation)[mask]))
        every = np.concatenate(gaps)
        return {"mean": float(every.mean()), "p99": float(np.quantile(every, 0.99)), "max": float(every.max()), "num_tokens": len(every)}

    async def logprobs(self, facts: dict[str, Any]) -> None:
        """Processed log-probs against Hugging Face in the same dtype; tokens per second of a second, warm batch."""
        most = self.config.rollout.max_new_tokens
        facts["logprob_gap"] = self.gap(await self.generate(max_new_tokens=most))
        began = time.perf_counter()
        generations = await self.generate(max_new_tokens=most)
        num_tokens = sum(len(generation.token_ids) for generation in generations)
        facts["tokens_per_s"] = round(num_tokens / (time.perf_counter() - began))
        limit = 0.03 if self.config.actor.dtype == "bfloat16" else 1e-3
        if facts["logprob_gap"]["mean"] > limit:
            raise AssertionError(f"mean gap of log-probs {facts['logprob_gap']} is above {limit}")

    def change(self) -> dict[str, torch.Tensor]:
        """A new version: every tensor moved by 2 percent noise. Its tensors under checkpoint names."""
        model = copy.deepcopy(self.models[-1])
        generator = torch.Generator(device=self.device).manual_seed(len(self.models))
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=self.device, dtype=torch.float32)
                parameter.add_((noise * 0.02 * parameter.float().abs().mean()).to(parameter.dtype))
        self.models.append(model)
        return named_weights(model)

    def offer(self, version: int, tensors: dict[str, torch.Tensor]) -> Any:
        """The weights as the settings say that they travel."""
        if self.config.vllm.weight_transfer == "ipc":
            from molt.rollout.transfer import offer_ipc

            self.offers.append(offer_ipc(tensors, policy_version=version))
            return self.offers[-1].source
        return write_weights(tensors, policy_version=version, folder=weights_folder("device-contract"))

    async def refits(self, facts: dict[str, Any], *, num_refits: int) -> None:
        """Refits in the middle of calls: every token's version, the log-probs under it, and the time of each phase."""
        most = self.config.data.max_len - max(len(prompt) for prompt in self.prompts) - 1
        calls = asyncio.create_task(self.generate(max_new_tokens=most))
        times = []
        for version in range(1, num_refits + 1):
            source = await asyncio.to_thread(lambda number=version: self.offer(number, self.change()))
            if calls.done():
                break
            times.append(await self._refit(source))
        generations = await calls
        if len(self.models) - 1 > len(times):
            self.models = self.models[: len(times) + 1]
        mixed = [generation for generation in generations if len(np.unique(generation.policy_versions)) > 1]
        facts |= {"refits": times, "num_mixed_calls": len(mixed), "mixed_gap": self.gap(generations)}
        after = await self.generate(max_new_tokens=self.config.rollout.max_new_tokens)
        facts["gap_after"] = self.gap(after)
        versions = {int(version) for generation in after for version in np.unique(generation.policy_versions)}
        if versions != {len(times)}:
            raise AssertionError(f"after {len(times)} refits tokens carry versions {versions}")
        if any((np.diff(generation.policy_versions) < 0).any() for generation in generations):
            raise AssertionError("a version goes down inside a call")
        limit = 0.05 if self.config.actor.dtype == "bfloat16" else 1e-3
        if max(facts["mixed_gap"]["mean"], facts["gap_after"]["mean"]) > limit:
            raise AssertionError(f"log-probs after refits differ by more than {limit}: {facts['mixed_gap']}, {facts['gap_after']}")

    async def _refit(self, source: Any) -> dict[str, Any]:
        began = time.perf_counter()
        in_flight = await self.engine.pause("keep")
        paused = time.perf_counter()
        report = await self.engine.refit(source)
        loaded = time.perf_counter()
        await self.engine.resume()
        from molt.rollout.weights import model_digest

        if report.weights_digest != model_digest(source.digests):
            raise AssertionError("the engine reports another digest than was sent")
        return {
            "pause_ms": round(1e3 * (paused - began), 1),
            "load_ms": round(1e3 * report.load_s, 1),
            "verify_ms": round(1e3 * report.verify_s, 1),
            "refit_ms": round(1e3 * (loaded - paused), 1),
            "resume_ms": round(1e3 * (time.perf_counter() - loaded), 1),
            "num_in_flight": in_flight,
            "size_mib": round(int(source.options["size_bytes"]) / 2**20, 1),
        }

    async def stop(self) -> None:
        """End the engine and free the card."""
        if self.handle is not None:
            await self.handle.stop()
        self.models, self.offers = [], []
        if self.device == "cuda":
            torch.cuda.empty_cache()
