"""A scripted engine for agents' tests: says what it is told, with log-probs and versions made up by rule, and keeps what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from molt.agents.tokenizer import Tokenizer
from molt.data.images import Image
from molt.data.processor import ImageProcessor
from molt.rollout.engine import FinishReason, Generation, Sampling

END = "<|end|>"


def generation(token_ids: Sequence[int], *, version: int = 0, finish_reason: FinishReason = FinishReason.STOP) -> Generation:
    """Ids with log-probs -0.5, -0.25, -0.125, ... (never the same value twice in a row) and one version."""
    count = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([-(0.5 ** (1 + place % 20)) for place in range(count)], np.float32),
        policy_versions=np.full(count, version, np.int32),
        kv_versions=np.full(count, version, np.int32),
        finish_reason=finish_reason,
    )


class ScriptedEngine:
    """Answers call n with script[n]: a text (the end token is added), a Generation, an exception, or an async function of the prompt."""

    def __init__(
        self, tokenizer: Tokenizer, *script: str | Generation | Exception | Callable, processor: ImageProcessor | None = None
    ) -> None:
        """processor: expands placeholders, as an engine does by itself."""
        self.tokenizer = tokenizer
        self.processor = processor
        self.script = list(script)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.request_ids: list[str] = []
        self.images: list[list[Image]] = []
        self.cut = asyncio.Event()
        """Set by the first abort."""

    @property
    def texts(self) -> list[str]:
        """The prompts as texts."""
        return [self.tokenizer.decode(prompt) for prompt in self.prompts]

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """The next entry of the script."""
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.request_ids.append(request_id)
        self.images.append(list(images))
        answer = await self._answer(prompt_ids, sampling)
        if images and self.processor is not None and answer.prompt_ids is None:
            return replace(answer, prompt_ids=self.processor.expand(np.array(prompt_ids, np.int32), images)[0])
        return answer

    async def abort(self, request_id: str) -> None:
        """Note that a request was given up."""
        self.cut.set()

    async def _answer(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        said = self.script[min(len(self.prompts), len(self.script)) - 1]
        if isinstance(said, Exception):
            raise said
        if callable(said):
            return await said(prompt_ids)
        if isinstance(said, Generation):
            return said
        ids = self.tokenizer.encode(said + END).tolist()
        if len(ids) > sampling.max_new_tokens:
            return generation(ids[: sampling.max_new_tokens], finish_reason=FinishReason.LENGTH)
        return generation(ids)
