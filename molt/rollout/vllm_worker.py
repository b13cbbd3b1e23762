"""What Molt adds to a vLLM worker: weights from a file, digests of what was loaded, proof that it arrived, routes on the CPU.

vLLM mixes this class into its worker (worker_extension_cls) and calls it by collective_rpc. Methods return plain data and never
raise: an exception in a worker may end the whole engine, while an answer with `error` refuses one refit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from molt.errors import RefitError
from molt.rollout.digest import Digester
from molt.rollout.engine import WeightSource
from molt.rollout.lifeline import end_with_engine
from molt.rollout.vllm_reload import drop_update
from molt.rollout.weights import read_tensors, read_weights

Pair = tuple[str, torch.Tensor]
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def _answered(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """An exception becomes an answer."""

    def answer(self: Any, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class RefitExtension:
    """Mixed into a vLLM worker: `self.model_runner`, `self.vllm_config` and `self.rank` are the worker's own."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _molt_tap: _Tap | None = None
    """Of the last update through a weight transfer engine."""

    @_answered
    def molt_check(self, path: str, digests: dict[str, str]) -> dict[str, Any]:
        """Read every byte of a weights file and compare it with the digests; loads nothing."""
        source = WeightSource(policy_version=0, transport="file", path=path, digests=digests)
        return {"num_tensors": sum(1 for _ in read_weights(source))}

    @_answered
    def molt_load(self, path: str, without: list[str]) -> dict[str, Any]:
        """Load a file that was checked, some tensors left out; answers with the digest of each as it was handed to the model."""
        tap = _Tap(self.model_runner.get_model())
        with tap, self._set_config():
            self._forget_packed_experts()
            self.model_runner.reload_weights(weights_iterator=read_tensors(path, without=without))
            self._mend_tied_head()
        return {"digests": tap.digests()}

    @_answered
    def molt_tap_open(self) -> dict[str, Any]:
        """Begin to note what a weight transfer engine hands to the model."""
        self._molt_tap = _Tap(self.model_runner.get_model())
        self._molt_tap.__enter__()
        self._forget_packed_experts()
        return {}

    @_answered
    def molt_tap_close(self) -> dict[str, Any]:
        """Stop noting; answers with the digest of each tensor that came."""
        assert self._molt_tap is not None, "the tap was opened"
        self._molt_tap.__exit__()
        with self._set_config():
            self._mend_tied_head()
        return {"digests": self._molt_tap.digests()}

    @_answered
    def molt_drop_update(self) -> dict[str, Any]:
        """Take away what a refit left that broke off; answers with the number of tensors that the last tap let pass."""
        num_passed = 0
        if self._molt_tap is not None:
            self._molt_tap.__exit__()
            num_passed = self._molt_tap.num_passed
        with self._set_config():
            drop_update(self)
        return {"num_passed": num_passed}

    @_answered
    def molt_prove(self, path: str, without: list[str]) -> dict[str, Any]:
        """Names of the file's tensors that the worker's parameters hold byte for byte, and the share of bytes that they are.

        A parameter that a kernel keeps in a layout of its own, or a shard of a tensor-parallel worker, cannot be compared this way.
        """
        parameters = dict(self.model_runner.get_model().named_parameters())
        held, size, whole = [], 0, 0
        for name, sent in read_tensors(path, without=without):
            num_bytes = sent.numel() * sent.element_size()
            whole += num_bytes
            if _holds(parameters, name, sent):
                held.append(name)
                size += num_bytes
        return {"names": held, "share": size / max(1, whole)}

    @_answered
    def molt_draw_apart(self, seed: int) -> dict[str, Any]:
        """Draw other random numbers than the other data-parallel cores do: not every release of vLLM sees to that (0.26)."""
        parallel = self.vllm_config.parallel_config
        index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        if index:
            own = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
            random.seed(own)
            np.random.seed(own)
            torch.manual_seed(own)
        return {"index": index}

    @_answered
    def molt_mend_speculation(self) -> dict[str, Any]:
        """Give the CPU build an expansion of temperatures over drafts: its own writes integers into a copy that nobody reads (0.32)."""
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_to_tokens
        return {}

    @_answered
    def molt_capture_routes(self, top_k: int) -> dict[str, Any]:
        """Note the experts of each token from now on, by hooks (the CPU build of vLLM has no capture of its own)."""
        self._molt_routes = _Routes(self.model_runner, top_k)
        return {"num_layers": self._molt_routes.num_layers}

    @_answered
    def molt_take_routes(self, request_id: str) -> dict[str, Any]:
        """Routes of a finished request by absolute position, -1 where no pass ran: bytes of int16 and shape. They are forgotten here."""
        routes = self._molt_routes.take(request_id)
        return {"data": routes.tobytes(), "shape": list(routes.shape)}

    def _set_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

    def _forget_packed_experts(self) -> None:
        """Let the CPU's expert kernels pack the new weights: an existing kernel would be given them unpacked, and compute nonsense."""
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _mend_tied_head(self) -> None:
        """Give a tied output head the new embeddings: a reload loads one of the two layers and would leave the head's own copy old."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.platforms import current_platform

        if not getattr(self.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        modules = list(self.model_runner.get_model().modules())
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        embeddings = [module for module in modules if type(module) is VocabParallelEmbedding]
        for head in heads:
            for embedding in embeddings[:1]:
                if head.weight.data_ptr() != embedding.weight.data_ptr():
                    head.weight.data.copy_(embedding.weight.data)
            if current_platform.is_cpu():
                head.quant_method.process_weights_after_loading(head)  # packs the weight again


def expand_to_tokens(values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
    """The value of each request for each of its tokens: [a, b] with ends [2, 5] is [a, a, b, b, b]; replace_from becomes replace_to."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    found = values.masked_fill(values == replace_from, replace_to) if replace_from != replace_to else values
    expanded = found.repeat_interleave(counts.long())
    assert len(expanded) == num_tokens, f"{len(expanded)} values for {num_tokens} tokens"
    return expanded


class _Tap:
    """Stands between a weight loader and the model and takes the digest of every tensor that passes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._digester = Digester()
        self.num_passed = 0

    def __enter__(self) -> _Tap:
        inner = self._model.load_weights

        def load_weights(weights: Iterable[Pair], *args: Any, **kwargs: Any) -> Any:
            return inner(self._pass(weights), *args, **kwargs)

        self._model.load_weights = load_weights
        return self

    def _pass(self, weights: Iterable[Pair]) -> Iterator[Pair]:
        if isinstance(weights, Sequence):  # what came in one buffer
            self.num_passed += len(weights)
            self._digester.note(weights)
            yield from weights
            return
        for pair in weights:
            self.num_passed += 1
            self._digester.note([pair])
            yield pair

    def __exit__(self, *_: object) -> None:
        vars(self._model).pop("load_weights", None)

    def digests(self) -> dict[str, str]:
        """Digest of each tensor that passed."""
        return self._digester.take()


def _holds(parameters: dict[str, torch.nn.Parameter], name: str, sent: torch.Tensor) -> bool:
    """Whether a parameter, or the place in a fused one, equals what was sent."""
    place = _place(parameters, name, sent)
    if place is None or place.dtype.itemsize == 1:  # quantized
        return False
    return place.shape == sent.shape and torch.equal(place.detach().cpu(), sent.to(place.dtype))


def _place(parameters: dict[str, torch.nn.Parameter], name: str, sent: torch.Tensor) -> torch.Tensor | None:
    """Where vLLM keeps a checkpoint tensor; None when nothing of that name and size is there."""
    if name in parameters:
        return parameters[name][: len(sent)] if sent.dim() and len(parameters[name]) >= len(sent) else parameters[name]
    expert = _EXPERT.match(name)
    if expert is not None:
        return _expert_place(parameters, expert[1], int(expert[2]), expert[3])
    for fused, parts in _STACKED.items():
        for part in parts:
            whole = parameters.get(name.replace(f".{part}.", f".{fused}."))
            if f".{part}." in name and whole is not None and whole.dim():
                first = {0: 0, len(parts) - 1: len(whole) - len(sent)}.get(parts.index(part), len(whole) - 2 * len(sent))
                return whole[first : first + len(sent)] if first >= 0 else None
    return None


def _expert_place(parameters: dict[str, torch.nn.Parameter], prefix: str, number: int, part: str) -> torch.Tensor | None:
    both = next((value for key, value in parameters.items() if key.startswith(prefix) and key.endswith("w13_weight")), None)
    down = next((value for key, value in parameters.items() if key.startswith(prefix) and key.endswith("w2_weight")), None)
    whole = down if part == "down_proj" else both
    if whole is None or whole.dim() != 3 or number >= len(whole):
        return None
    if part == "down_proj":
        return whole[number]
    half = whole.shape[1] // 2
    return whole[number, :half] if part == "gate_proj" else whole[number, half:]


class _Routes:
    """Experts of each token, from hooks on the gates and the order of requests in each pass."""

    def __init__(self, runner: Any, top_k: int) -> None:
        self._runner = runner
        self._top_k = top_k
        self._passed: list[torch.Tensor] = []
        self._known: dict[str, dict[int, np.ndarray]] = {}
        gates = [module for name, module in runner.get_model().named_modules() if name.endswith(".gate") and hasattr(module, "weight")]
        if not gates:
            raise RefitError("train.routing_replay is set and the model has no expert gates; unset it")
        self.num_layers = len(gates)
        for gate in gates:
            gate.register_forward_hook(self._note)
        inner = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._passed.clear()
            result = inner(scheduler_output, *args, **kwargs)
            self._lay(scheduler_output)
            return result

        runner.execute_model = execute_model

    def _note(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        self._passed.append(logits.float().topk(self._top_k, dim=-1).indices.to(torch.int16))

    def _lay(self, scheduled: Any) -> None:
        """Put the rows of one pass at the positions of their requests."""
        if not self._passed or len(self._passed) != self.num_layers:
            return
        routes = torch.stack(self._passed, dim=1).numpy()  # (tokens of the pass, layers, top_k)
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        row = 0
        for request_id in self._runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens.get(request_id, 0)
            rows = self._known.setdefault(request_id, {})
            for place in range(count):
                # The first pass over a position sampled what followed it; a pass after a refit or a preemption does not replace it.
                rows.setdefault(starts[request_id] + place, routes[row + place])
            row += count

    def take(self, request_id: str) -> np.ndarray:
        """(positions, layers, top_k) int16, -1 where unknown."""
        rows = self._known.pop(request_id, {})
        laid = np.full((max(rows, default=-1) + 1, self.num_layers, self._top_k), -1, dtype=np.int16)
        for place, experts in rows.items():
            laid[place] = experts
        return laid


end_with_engine()  # vLLM imports this module in each of its workers, before anything is loaded
