"""Model calls inside the vLLM engine: which version sampled which token, and an output as a Generation.

A call carries marks (token count, version). Weights change only while vLLM is paused and its output handler has nothing left
to do, so the number of tokens that the handler knows then is exactly the number that the old weights sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt.data.images import Image
from molt.errors import EngineError, LineageError
from molt.rollout.engine import FinishReason, Generation, Sampling

_FIRST_ROUTE = "routed_experts_prompt_start"
"""What vLLM calls Sampling.routes_from, where it has it."""
_SPARE_ROWS = 8
"""Rows past the last token that vLLM may give: of steps that were under way when a call ended."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One running model call."""

    request_id: str
    vllm_id: str
    """Its name inside vLLM: never used twice."""
    prompt_ids: list[int]
    sampling: Sampling
    images: tuple[Image, ...] = ()
    """One for each placeholder of prompt_ids."""
    task: asyncio.Task[Generation] | None = None
    core_id: str | None = None
    """Its name inside vLLM's core, once it was added."""
    is_aborted: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(tokens sampled before, version): from that token on, the version sampled it."""

    def versions(self, num_tokens: int) -> np.ndarray:
        """(num_tokens,) int32: version of each token."""
        versions = np.zeros(num_tokens, dtype=np.int32)
        for start, version in self.marks:
            versions[start:] = version
        return versions


class Handler:
    """Watches vLLM's output handler, so that one can wait until everything that the engine core sent has been taken in.

    The core answers a pause on the same ordered channel after the outputs of its last step. When the handler then waits for
    more and the queue before it is empty, nothing is under way. An error there is the end of vLLM: calls end with it, but of those
    that are no generation (a pause, a refit) vLLM itself would wait for the answer for ever.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._inner = client.get_output_async
        self._is_waiting = asyncio.Event()
        self.death: str | None = None
        client.get_output_async = self._get

    async def _get(self) -> Any:
        self._is_waiting.set()
        try:
            return await self._inner()
        except Exception as error:
            self.death = f"{type(error).__name__}: {error}"
            for waiting in self._client.utility_results.values():
                if not waiting.done():
                    waiting.set_exception(EngineError(f"vLLM's core is gone ({self.death})"))
            raise
        finally:
            self._is_waiting.clear()

    async def settle(self, limit_s: float) -> None:
        """Return once nothing is under way from a paused core; EngineError past the limit."""
        try:
            async with asyncio.timeout(limit_s):
                while not (self._is_waiting.is_set() and self._client.outputs_queue.empty()):
                    await asyncio.sleep(0.001)
        except TimeoutError as error:
            raise EngineError(f"vLLM's output handler did not come to rest within {limit_s:g} s of a pause") from error


def prompt_of(call: Call, picture: Callable[[Image], Any]) -> dict[str, Any]:
    """What vLLM is given to continue. picture: an image decoded; vLLM's own processor expands its placeholder."""
    # The salt keys cached prefixes by version, so that no entry of other weights is ever taken for a new call.
    prompt: dict[str, Any] = {"prompt_token_ids": call.prompt_ids, "cache_salt": f"version {call.marks[0][1]}"}
    if call.images:
        prompt["multi_modal_data"] = {"image": [picture(image) for image in call.images]}
        prompt["multi_modal_uuids"] = {"image": [image.digest for image in call.images]}
    return prompt


def sampling_params(call: Call, max_len: int, *, is_delta: bool, is_seeded: bool) -> Any:
    """vLLM's parameters of a call. is_delta: leave out routes that are known. is_seeded: by a random generator of its own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = call.sampling
    asked = {_FIRST_ROUTE: sampling.routes_from} if is_delta else {}
    return SamplingParams(
        max_tokens=min(sampling.max_new_tokens, max_len - len(call.prompt_ids)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed if is_seeded else None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,  # a few lists for each call in place of two objects for each token
        **asked,
    )


def can_leave_routes_out() -> bool:
    """Whether this release of vLLM gives routes from a position on."""
    from vllm import SamplingParams

    return _FIRST_ROUTE in getattr(SamplingParams, "__struct_fields__", ())


def to_generation(call: Call, output: Any, routes: np.ndarray | None, *, is_cache_kept: bool) -> Generation:
    """A finished vLLM output as a Generation; LineageError when its columns do not fit each other. routes: from sampling.routes_from on."""
    completion = output.outputs[0]
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = _logprobs(call, completion.logprobs, token_ids)
    versions = call.versions(len(token_ids))
    _compare_spans(call, completion, versions)
    prompt_ids = np.asarray(output.prompt_token_ids, np.int32) if call.images else None
    num_positions = len(call.prompt_ids if prompt_ids is None else prompt_ids) + len(token_ids) - 1
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=versions,
        # With entries kept across a refit, each later token attends to some that the first version made.
        kv_versions=np.full_like(versions, call.marks[0][1]) if is_cache_kept and len(versions) else versions.copy(),
        finish_reason=_reason(call, completion),
        routed_experts=None if routes is None else fit_routes(routes, num_positions - call.sampling.routes_from),
        routes_from=call.sampling.routes_from,
        prompt_ids=prompt_ids,
    )


def _logprobs(call: Call, given: Any, token_ids: np.ndarray) -> np.ndarray:
    """(N,) float32: the log-prob of each sampled id. vLLM gives one entry a token, since nothing beside the sampled one is asked for."""
    if given is None or len(given) == 0:
        named, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    else:
        named, logprobs = np.asarray(given.token_ids, np.int32), np.asarray(given.logprobs, np.float32)
    if len(logprobs) != len(token_ids) or not np.array_equal(named, token_ids):
        raise LineageError(f"request {call.request_id}: vLLM gave {len(token_ids)} ids and {len(logprobs)} log-probs, or of other ids")
    return logprobs


def _reason(call: Call, completion: Any) -> FinishReason:
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"request {call.request_id}: vLLM ended it by {completion.finish_reason}")
    return FinishReason(completion.finish_reason)


def _compare_spans(call: Call, completion: Any, versions: np.ndarray) -> None:
    """Newer releases of vLLM label each step's tokens themselves: where there is a label, both accounts must agree."""
    for span in getattr(completion, "weight_versions", None) or ():
        version, start, end = (span[0], span[1], span[2]) if isinstance(span, tuple) else (span.version, span.start, span.end)
        told = set(versions[start:end].tolist())
        if version.isdigit() and told - {int(version)}:
            raise LineageError(
                f"request {call.request_id}: tokens {start} to {end} carry versions {sorted(told)}, vLLM's core says {version}"
            )


def fit_routes(routes: np.ndarray, num_positions: int) -> np.ndarray:
    """(num_positions, L, K) int16 from what the engine gave; rows that it lacks are unknown, far too many are refused."""
    if len(routes) > max(0, num_positions) + _SPARE_ROWS:
        raise LineageError(f"vLLM gave routed experts of {len(routes)} positions where {num_positions} were asked for")
    num_positions = max(0, num_positions)
    fitted = np.full((num_positions, *routes.shape[1:]), -1, dtype=np.int16)
    fitted[: min(num_positions, len(routes))] = routes[:num_positions]
    return fitted
