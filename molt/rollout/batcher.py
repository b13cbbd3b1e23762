"""Continuous batching of the embedded engine: which request has which slot, and what the next forward pass runs.

    waiting --a slot is free--> prefill (whole prompt, or what the slot's cache lacks) --> decode, one id per pass --> future is set
    A refit drops what free slots remember; running slots keep their entries (kv keep) or make them again (kv recompute).

A free slot remembers the ids in its cache: a request that begins with them reuses them, until the next refit.
Everything here is called from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from molt.data.images import Image
from molt.data.processor import PlacedImage
from molt.errors import EngineError, LineageError
from molt.rollout.decoder import SlotDecoder
from molt.rollout.engine import FinishReason, Generation, RefitReport, Sampling, WeightSource
from molt.rollout.sampler import SamplingRows, sample_ids, uniforms

_PREFILL_TOKENS = 4096
"""Most new tokens of all rows in one prefill pass."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One running model call; only the engine thread writes to it."""

    request_id: str
    ids: list[int]
    """Prompt and sampled ids, images expanded."""
    keys: list[int]
    """What cache entries depend on, position by position: ids, and a number of the image where one stands; `ids` itself without any."""
    images: Sequence[PlacedImage]
    prompt_len: int
    limit: int
    """Ids after which it ends by length."""
    sampling: Sampling
    uniforms: np.ndarray
    future: Future[Generation]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Slot:
    """One row of the cache: whose entries it holds."""

    request: Request | None = None
    keys: list[int] = field(default_factory=list)
    """Keys of the entries in the cache, from position 0."""
    kv_version: int = 0
    """Oldest version among the entries."""
    routes: np.ndarray | None = None


class Batcher:
    """Requests and slots of one engine; `step` runs one forward pass."""

    def __init__(self, decoder: SlotDecoder, *, name: str, max_num_seqs: int, kv_on_refit: str, policy_version: int) -> None:
        self.decoder = decoder
        self._name = name
        self._kv_on_refit = kv_on_refit
        self._version = policy_version
        self._slots = [Slot(kv_version=policy_version) for _ in range(max_num_seqs)]
        self._waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._is_paused = False
        self.num_sampled = 0

    @property
    def has_work(self) -> bool:
        """Whether a pass can run now."""
        return not self._is_paused and bool(self._requests)

    def accept(self, request_id: str, ids: list[int], sampling: Sampling, images: Sequence[Image] = ()) -> Future[Generation]:
        """Queue a request, or join the one that runs under this id. EngineError when it cannot be served."""
        ids, placed = self._expanded(request_id, ids, images)
        keys = _keys(ids, placed)
        known = self._requests.get(request_id)
        if known is not None:
            if known.keys[: known.prompt_len] != keys or known.sampling != sampling:
                raise EngineError(f"request {request_id} is running with another prompt or sampling; use a new request_id")
            return known.future
        if not ids or min(ids) < 0 or max(ids) >= self.decoder.vocab_size:
            raise EngineError(f"request {request_id}: a prompt needs ids within [0, {self.decoder.vocab_size}), got {len(ids)} ids")
        if len(ids) >= self.decoder.max_len or sampling.max_new_tokens < 1:
            raise EngineError(
                f"request {request_id}: prompt of {len(ids)} ids and max_new_tokens={sampling.max_new_tokens} leave no room "
                f"in max_len={self.decoder.max_len}; end the rollout as truncated or raise data.max_len"
            )
        limit = min(self.decoder.max_len, len(ids) + sampling.max_new_tokens)
        request = Request(
            request_id=request_id,
            ids=ids,
            keys=keys,
            images=placed,
            prompt_len=len(ids),
            limit=limit,
            sampling=sampling,
            uniforms=uniforms(sampling.seed, limit - len(ids)),
            future=Future(),
        )
        self._requests[request_id] = request
        self._waiting.append(request)
        return request.future

    def _expanded(self, request_id: str, ids: list[int], images: Sequence[Image]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """The prompt as the model consumes it."""
        if not images:
            return ids, ()
        if self.decoder.processor is None:
            raise EngineError(f"request {request_id}: {len(images)} images for a model that takes none")
        try:
            whole, placed = self.decoder.processor.expand(np.array(ids, np.int32), images)
        except LineageError as error:
            raise EngineError(f"request {request_id}: {error}") from error
        return whole.tolist(), placed

    def abort(self, request_id: str) -> None:
        """End one request; its tokens are kept."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)

    def pause(self, mode: str) -> int:
        """No pass runs until resume; returns the requests in flight. Mode abort ends them."""
        if mode not in ("keep", "abort"):
            raise EngineError(f"pause mode={mode}, known are keep and abort")
        self._is_paused = True
        in_flight = list(self._requests.values())
        if mode == "abort":
            for request in in_flight:
                self._finish(request, FinishReason.ABORT)
        return len(in_flight)

    def refit(self, source: WeightSource) -> RefitReport:
        """Take new weights; RefitError leaves the old ones serving under their version."""
        if not self._is_paused:
            raise EngineError(f"engine {self._name}: refit needs a pause first")
        begin = time.perf_counter()
        self.decoder.take(source)
        loaded = time.perf_counter()
        digest = self.decoder.weights_digest()
        for slot in self._slots:
            if slot.request is None or self._kv_on_refit == "recompute":
                slot.keys, slot.kv_version = [], source.policy_version
            if slot.request is None or not slot.request.versions:
                slot.routes = None if slot.request is None or slot.routes is None else np.full_like(slot.routes, -1)
        self._version = source.policy_version
        return RefitReport(
            engine=self._name,
            policy_version=self._version,
            weights_digest=digest,
            load_s=loaded - begin,
            verify_s=time.perf_counter() - loaded,
            num_in_flight=len(self._requests),
            caches=(*(("kv",) if self._kv_on_refit == "recompute" else ()), *(("images",) if self.decoder.processor else ())),
        )

    def resume(self) -> None:
        """Passes may run again."""
        self._is_paused = False

    def close(self) -> None:
        """End every request as abort."""
        for request in list(self._requests.values()):
            self._finish(request, FinishReason.ABORT)

    def fail(self, error: Exception) -> None:
        """Tell every waiter that the engine failed."""
        for request in self._requests.values():
            request.future.set_exception(error)
        self._requests.clear()
        self._waiting.clear()

    def step(self) -> None:
        """One forward pass: prefill of requests that lack cache entries if there are any, else one id for each running request."""
        self._seat()
        running = [(index, slot) for index, slot in enumerate(self._slots) if slot.request is not None]
        lacking = [(index, slot, _lacking(slot)) for index, slot in running]
        long = [item for item in lacking if item[2] > 1]
        self._pass(_within(long, _PREFILL_TOKENS) if long else lacking)

    def _seat(self) -> None:
        """Give free slots to waiting requests: the one that remembers most of the prompt, else the one that remembers least."""
        while self._waiting:
            free = [slot for slot in self._slots if slot.request is None]
            if not free:
                return
            request = self._waiting.popleft()
            shared = [_shared_prefix(slot.keys, request.keys) for slot in free]
            best = max(range(len(free)), key=lambda place: (shared[place], -len(free[place].keys)))
            slot, kept = free[best], min(shared[best], len(request.ids) - 1)
            slot.request, slot.keys = request, slot.keys[:kept]
            if not kept:
                slot.kv_version = self._version
            if self.decoder.num_moe_layers:
                slot.routes = self._routes_for(request, slot.routes, kept)

    def _routes_for(self, request: Request, old: np.ndarray | None, kept: int) -> np.ndarray:
        new = np.full((request.limit, *self.decoder.routes_shape), -1, dtype=np.int16)
        if old is not None:
            new[:kept] = old[:kept]
        return new

    def _pass(self, rows: list[tuple[int, Slot, int]]) -> None:
        requests = [slot.request for _, slot, _ in rows]
        assert all(requests), "a pass runs rows that have a request"
        live = [request for request in requests if request is not None]
        starts = [len(slot.keys) for _, slot, _ in rows]
        new_ids = [request.ids[start : start + count] for request, start, (_, _, count) in zip(live, starts, rows, strict=True)]
        logits, routes = self.decoder.forward([index for index, _, _ in rows], new_ids, starts, [request.images for request in live])
        for place, (_, slot, count) in enumerate(rows):
            slot.keys.extend(live[place].keys[starts[place] : starts[place] + count])
            if routes is not None and slot.routes is not None:
                _keep_first(slot.routes[starts[place] : starts[place] + count], routes[place, -count:])
        done = [place for place, (_, slot, _) in enumerate(rows) if len(slot.keys) == len(live[place].keys)]
        if done:
            self._sample(logits[done] if len(done) < len(rows) else logits, [rows[place][1] for place in done])

    def _sample(self, logits: torch.Tensor, slots: list[Slot]) -> None:
        live = [slot.request for slot in slots if slot.request is not None]
        ids, logprobs = sample_ids(logits, _sampling_rows(live, logits.device))
        for slot, request, token, logprob in zip(slots, live, ids.tolist(), logprobs.tolist(), strict=True):
            self.num_sampled += 1
            request.ids.append(token)
            if request.images:
                request.keys.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            request.kv_versions.append(slot.kv_version)
            if token in request.sampling.stop_token_ids:
                self._finish(request, FinishReason.STOP)
            elif len(request.ids) >= request.limit:
                self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        del self._requests[request.request_id]
        routes = None
        seat = next((slot for slot in self._slots if slot.request is request), None)
        if seat is not None:
            seat.request = None
            if min([seat.kv_version, *request.versions[:1]]) != self._version:
                seat.keys = []  # entries and routes of old weights serve the request that began under them, and nobody after it
            if seat.routes is not None:
                routes = seat.routes[request.sampling.routes_from : len(request.ids) - 1].copy()
        else:
            self._waiting.remove(request)
            if self.decoder.num_moe_layers:
                routes = self._routes_for(request, None, 0)[request.sampling.routes_from : len(request.ids) - 1]
        request.future.set_result(
            Generation(
                token_ids=np.array(request.ids[request.prompt_len :], dtype=np.int32),
                logprobs=np.array(request.logprobs, dtype=np.float32),
                policy_versions=np.array(request.versions, dtype=np.int32),
                kv_versions=np.array(request.kv_versions, dtype=np.int32),
                finish_reason=reason,
                routed_experts=routes,
                routes_from=request.sampling.routes_from,
                prompt_ids=np.array(request.ids[: request.prompt_len], np.int32) if request.images else None,
            )
        )


def _keys(ids: list[int], images: Sequence[PlacedImage]) -> list[int]:
    """Keys of a prompt: numbers below 0 stand for images by their content."""
    if not images:
        return ids
    keys = list(ids)
    for image in images:
        number = -1 - int(image.expansion.image.digest[:15], 16)
        keys[image.position : image.end] = [number] * (image.end - image.position)
    return keys


def _lacking(slot: Slot) -> int:
    """Ids of the slot's request that have no entry in the cache yet; the newest id never has one."""
    assert slot.request is not None, "an idle slot lacks nothing"
    return len(slot.request.keys) - len(slot.keys)


def _within(rows: list[tuple[int, Slot, int]], limit: int) -> list[tuple[int, Slot, int]]:
    """The first rows, or the beginning of the first one, whose padded pass has at most `limit` tokens."""
    rows = sorted(rows, key=lambda row: row[2])
    taken: list[tuple[int, Slot, int]] = []
    for index, slot, count in rows:
        if taken and count * (len(taken) + 1) > limit:
            break
        taken.append((index, slot, min(count, limit)))
    return taken


def _shared_prefix(known: list[int], ids: list[int]) -> int:
    """Length of the common beginning."""
    num = min(len(known), len(ids))
    if known[:num] == ids[:num]:
        return num
    return next(place for place in range(num) if known[place] != ids[place])


def _keep_first(stored: np.ndarray, new: np.ndarray) -> None:
    """Fill unknown routes; a position that is run again keeps the experts that were used when its successor was sampled."""
    np.copyto(stored, new, where=stored < 0)


def _sampling_rows(requests: list[Request], device: torch.device) -> SamplingRows:
    """Parameters and random numbers of the next id of each request."""
    sampling = [request.sampling for request in requests]
    return SamplingRows(
        temperature_B=torch.tensor([item.temperature for item in sampling], device=device, dtype=torch.float32),
        top_p_B=torch.tensor([item.top_p for item in sampling], device=device, dtype=torch.float32),
        top_k_B=torch.tensor([item.top_k for item in sampling], device=device),
        uniform_B=torch.tensor([item.uniforms[len(item.logprobs)] for item in requests], device=device, dtype=torch.float64),
        is_masked=any(item.top_p < 1.0 or item.top_k > 0 for item in sampling),
    )
