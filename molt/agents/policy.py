"""The policy as one rollout calls it: messages in, an Action out; ids, limits and capture inside."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from molt.agents.conversation import CallPrompt, Conversation
from molt.agents.env import Action, StopReason, check_messages
from molt.agents.render import ChatRenderer
from molt.agents.segments import SegmentBuilder
from molt.data.images import MAX_PIXELS, Image
from molt.data.messages import Message, images_of
from molt.data.processor import contract
from molt.errors import AgentError, EngineError, MoltError
from molt.rollout.engine import FinishReason, Generation, Sampling

Generate = Callable[[str, Sequence[int], Sampling, Sequence[Image]], Awaitable[Generation]]
"""(request_id, prompt_ids, sampling, images) -> Generation, as Engine.generate."""

_PAUSE_S = 0.01
MAX_CONTINUATIONS = 16
"""Times that one call is taken up again after the engine cut it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What bounds one rollout."""

    max_turns: int
    max_len: int
    """Longest segment in tokens."""
    timeout_s: float
    max_images: int = 8
    """Most images in one prompt."""
    max_image_pixels: int = MAX_PIXELS


class LimitReached(BaseException):
    """Leaves the agent's code when a limit of the rollout is reached; no Exception, so that `except Exception` lets it pass."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Policy:
    """Implements molt.agents.env.Model for one rollout."""

    def __init__(
        self,
        renderer: ChatRenderer,
        generate: Generate,
        *,
        limits: EpisodeLimits,
        sampling: Sampling,
        rollout_id: str,
        seed: int,
        is_trainable: bool,
        keep_history: bool = False,
    ) -> None:
        stop_ids = tuple(sorted({*sampling.stop_token_ids, *renderer.stop_token_ids}))
        self.builder = SegmentBuilder(is_trainable=is_trainable, stop_token_ids=stop_ids)
        self.num_turns = 0
        self.is_waiting = False
        """Whether a model call is in flight now."""
        self.last_finish: FinishReason | None = None
        self.first_cause: MoltError | None = None
        """First error of engine, template or capture; it decides, even if the agent's code swallowed it."""
        self.limit: StopReason | None = None
        """The limit that was reached."""
        self.is_late_in_call = False
        """Whether a model call was in flight when rollout.timeout_s was reached."""
        self.too_long: str | None = None
        """Set when the first prompt leaves no room to sample."""
        self._conversation = Conversation(renderer, keep_history=keep_history)
        self._generate = generate
        self._limits = limits
        self._sampling = replace(sampling, stop_token_ids=stop_ids)
        self.rollout_id = rollout_id
        self._num_abandoned = 0
        """Calls that the agent gave up waiting for: the engine may still be ending them under their names."""
        self._seed = seed

    async def generate(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Action:
        """Sample the next assistant message."""
        if self.is_waiting:
            raise AgentError("model.generate was called while a call of the same rollout was in flight; await one before the next")
        if self.limit is not None:
            # The agent let an earlier one not pass, or goes on after its time: a loop that does so must not stop the others on this worker.
            await asyncio.sleep(_PAUSE_S)
            raise LimitReached(self.limit)
        if max_new_tokens is not None and (not isinstance(max_new_tokens, Integral) or max_new_tokens < 1):
            raise AgentError(
                f"model.generate(max_new_tokens={max_new_tokens!r}), it must be a whole number above 0; end the rollout instead"
            )
        if self.num_turns >= self._limits.max_turns:
            self._stop(StopReason.MAX_TURNS)
        self.is_waiting = True
        try:
            check_messages(messages)
            await self._see(images_of(messages))
            prompt = self._conversation.prompt(messages)
            generation = await self._sample(prompt, self._budget(prompt, max_new_tokens))
            self.builder.add(prompt, generation, self.num_turns)
        except MoltError as error:
            self.first_cause = self.first_cause or error
            raise
        except asyncio.CancelledError:
            self._num_abandoned += 1
            raise
        finally:
            self.is_waiting = False
        turn = self.num_turns
        self.num_turns += 1
        self.last_finish = generation.finish_reason
        # A call that sampled nothing is no turn: nothing continues it.
        text = self._conversation.add(messages, prompt, generation.token_ids, number=turn).text if len(generation.token_ids) else ""
        return Action(
            text=text,
            token_ids=generation.token_ids,
            finish_reason=generation.finish_reason,
            turn=turn,
            tools=self._conversation.renderer.tools,
        )

    async def _see(self, images: Sequence[Image]) -> None:
        """Stop before a call with too many images; refuse one that is too large. The processor looks at new ones in a thread of its own,
        since other rollouts share the loop."""
        if len(images) > self._limits.max_images:
            if not self.builder.segments:
                self.too_long = f"the first prompt has {len(images)} images, data.max_images={self._limits.max_images}"
            self._stop(StopReason.IMAGES)
        for image in images:
            if image.width * image.height > self._limits.max_image_pixels:
                raise AgentError(
                    f"an image has {image.width} x {image.height} pixels, data.max_image_pixels={self._limits.max_image_pixels}; scale it"
                )
        processor = self._conversation.renderer.processor
        for image in images:
            if processor is not None and not processor.knows(image):
                await asyncio.to_thread(processor.expansion, image)

    def _sent(self, prompt: CallPrompt) -> list[int]:
        """The prompt as the engine is sent it: one placeholder for each image."""
        processor = self._conversation.renderer.processor
        if processor is None or not prompt.images:
            return prompt.token_ids.tolist()
        sent = contract(prompt.token_ids, prompt.images, processor.placeholder_id)
        if int((sent == processor.placeholder_id).sum()) != len(prompt.images):
            self._stop(StopReason.IMAGES)  # the policy wrote one itself, in an earlier turn
        return sent.tolist()

    def _budget(self, prompt: CallPrompt, asked: int | None) -> int:
        """Tokens that this call may sample."""
        room = self._limits.max_len - len(prompt.token_ids)
        if room <= 0:
            if not self.builder.segments:
                self.too_long = f"the first prompt has {len(prompt.token_ids)} tokens, data.max_len={self._limits.max_len} leaves no room"
            self._stop(StopReason.CONTEXT)
        return min(room, self._sampling.max_new_tokens, room if asked is None else int(asked))

    def _stop(self, reason: StopReason) -> None:
        self.limit = reason
        raise LimitReached(reason)

    async def _sample(self, prompt: CallPrompt, budget: int) -> Generation:
        """One call; a call that the engine cut goes on from the tokens it has, within the same budget and the same turn."""
        parts: list[Generation] = []
        prompt_ids = self._sent(prompt)
        images = [placed.expansion.image for placed in prompt.images]
        routes_from = self.builder.num_routed(prompt)
        for part_number in range(MAX_CONTINUATIONS):
            done_ids = [int(token_id) for part in parts for token_id in part.token_ids]
            again = f"/again{self._num_abandoned}" if self._num_abandoned else ""
            request_id = f"{self.rollout_id}/{self.num_turns}/{part_number}{again}"
            sampling = replace(
                self._sampling, max_new_tokens=budget - len(done_ids), seed=call_seed(self._seed, request_id), routes_from=routes_from
            )
            part = await self._generate(request_id, prompt_ids + done_ids, sampling, images)
            parts.append(part)
            if part.routed_experts is not None:
                routes_from = part.routes_from + len(part.routed_experts)
            if part.finish_reason is not FinishReason.ABORT:
                return join_generations(parts)
            if len(done_ids) + len(part.token_ids) >= budget or self._writes_image(prompt, part):
                return replace(join_generations(parts), finish_reason=FinishReason.LENGTH)
        raise EngineError(f"call {self.rollout_id}/{self.num_turns} was cut {MAX_CONTINUATIONS} times before it finished")

    def _writes_image(self, prompt: CallPrompt, part: Generation) -> bool:
        """Whether a part that was cut holds what stands for an image, so that it cannot be sent again beside images."""
        processor = self._conversation.renderer.processor
        return processor is not None and bool(prompt.images) and processor.placeholder_id in part.token_ids


def call_seed(seed: int, request_id: str) -> int:
    """Seed of one model call, 31 bits: its own for every call of every member, the same in a repeated run."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def join_generations(parts: Sequence[Generation]) -> Generation:
    """One generation out of the parts of a call that was cut and taken up again; each part tells the routes that it computed first."""
    if len(parts) == 1:
        return parts[0]
    told = [part for part in parts if part.routed_experts is not None]
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        kv_versions=np.concatenate([part.kv_versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
        routed_experts=np.concatenate([part.routed_experts for part in told]) if told else None,
        routes_from=told[0].routes_from if told else 0,
        prompt_ids=_first_prompt(parts),
    )


def _first_prompt(parts: Sequence[Generation]) -> np.ndarray | None:
    """The prompt as the engine consumed it, from the first part that tells; later parts were sent what the earlier ones sampled too."""
    num_done = 0
    for part in parts:
        if part.prompt_ids is not None:
            return part.prompt_ids[: len(part.prompt_ids) - num_done]
        num_done += len(part.token_ids)
    return None
