"""The engine protocol: ids in, ids out, with a log-prob and a policy version for each.

generate ... waits for a free slot, then for its tokens; a pause holds it between tokens, a resume lets it go on
pause    ... returns when no forward pass runs; requests in flight keep their tokens ("keep") or end as "abort"
refit    ... only while paused: takes weights, drops caches, compares digests, then counts as the new version
resume   ... generation goes on; tokens sampled from now on carry the new version
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from molt.data.images import Image


class FinishReason(StrEnum):
    """What ended one model call."""

    STOP = "stop"
    """A stop id was sampled; it is the last id, with its log-prob."""
    LENGTH = "length"
    """max_new_tokens or the context ended it."""
    ABORT = "abort"
    """It was cut; the tokens are exactly those known to be sampled, perhaps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution to sample from, in full: nothing is left to an engine's default."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy (evaluation only)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    seed: int | None = None
    """Distinct for each call of each member of a group."""
    stop_token_ids: tuple[int, ...] = ()
    routes_from: int = 0
    """First position whose routed experts are wanted; an earlier call has told those before. At most the length of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens of one model call. All per-token fields have equal length."""

    token_ids: np.ndarray
    """(N,) int32: the stop id included when there was one."""
    logprobs: np.ndarray
    """(N,) float32, nats: processed log-prob of each id (the distribution that was sampled from)."""
    policy_versions: np.ndarray
    """(N,) int32: version of the weights that sampled each id."""
    kv_versions: np.ndarray
    """(N,) int32: oldest version among the cache entries that each id attended to."""
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    """(P + N - 1 - routes_from, L, K) int16: experts by position, -1 where unknown; None for a dense model."""
    routes_from: int = 0
    """Position of the first row of routed_experts: as it was asked."""
    prompt_ids: np.ndarray | None = None
    """(P,) int32: the prompt as the model consumed it, each placeholder expanded; None for a prompt without images."""


def nothing_sampled() -> Generation:
    """A call that was cut before its first token."""
    none = np.zeros(0, np.int32)
    return Generation(
        token_ids=none, logprobs=np.zeros(0, np.float32), policy_versions=none, kv_versions=none, finish_reason=FinishReason.ABORT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself, once, at start."""

    name: str
    kind: str
    """vllm or embedded."""
    policy_version: int
    max_len: int
    vocab_size: int
    weights_digest: str
    """molt.rollout.weights.model_digest over its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where new weights lie."""

    policy_version: int
    transport: str
    """file: safetensors file in shared memory; ipc: CUDA handles; nccl: a process group."""
    path: str | None = None
    """file: the safetensors file."""
    digests: dict[str, str] = field(default_factory=dict)
    """Hugging Face tensor name to the digest of its bytes, C order, in the dtype sent (molt.rollout.digest)."""
    options: dict[str, str] = field(default_factory=dict)
    """Further facts of the transport."""

    @property
    def reaches(self) -> frozenset[str] | None:
        """nccl: the engines that the broadcast must reach, all of them or none. None: any engine may take the weights, at any time."""
        return frozenset(json.loads(self.options["init"])) if self.transport == "nccl" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """What one engine says of one refit."""

    engine: str
    policy_version: int
    weights_digest: str
    load_s: float
    verify_s: float
    num_in_flight: int
    caches: tuple[str, ...] = ()
    """What it dropped since old weights made it: kv (keys and values), images (their features)."""


class Engine(Protocol):
    """One rollout engine. Every implementation passes tests/rollout/engine_contract.py.

    Errors: EngineError when a request cannot be served, RefitError when weights differ from what was sent.
    A retried request_id that is running joins it instead of starting a second generation.
    """

    async def start(self) -> EngineInfo:
        """Load the model; returns when it can generate."""
        ...

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """Sample a continuation of prompt_ids. images: one for each placeholder in them, in order; the engine expands it."""
        ...

    async def abort(self, request_id: str) -> None:
        """End one request early; its generate returns with finish_reason abort."""
        ...

    async def pause(self, mode: str = "keep") -> int:
        """Hold generation between tokens; mode keep or abort. Returns the number of requests in flight."""
        ...

    async def refit(self, source: WeightSource) -> RefitReport:
        """Take new weights while paused; drop caches; compare a digest for each tensor."""
        ...

    async def resume(self) -> None:
        """Let generation go on."""
        ...

    async def weights_digest(self) -> str:
        """Digest over the tensors that it serves now."""
        ...

    async def stop(self) -> None:
        """Free everything. Requests in flight end as abort."""
        ...
