"""The other side of each ratio: vLLM alone, and a plain FSDP2 loop over the same packed rows, without anything of Molt's loop.

python -m tools.device.bare FOLDER        (vLLM alone on FOLDER/calls.json, each time that FOLDER/go-N appears, into FOLDER/found-N.json)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.device.parts import Child

PEAK_FLOPS = 989e12
"""Dense bf16 of one H200, by its data sheet."""
GO_LIMIT_S = 400.0
"""Longest wait of a started engine for the word to begin; it ends then."""

Call = tuple[list[int], int]
"""Prompt ids, and how many tokens to sample."""


class BareEngine:
    """vLLM alone in a process of its own: it starts, and makes all calls each time it is told to."""

    def __init__(self, config: Any, calls: Sequence[Call], *, work: Path, log: Path) -> None:
        self._folder = work
        self._log = log
        self._child: Child | None = None
        self._num_measured = 0
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / "calls.json").write_text(json.dumps({"config": config.model_dump_json(), "calls": calls}))

    def launch(self) -> None:
        """Begin to start."""
        self._child = Child([sys.executable, "-m", "tools.device.bare", str(self._folder)], log=self._log)

    def measure(self, *, limit_s: float) -> dict[str, Any]:
        """What it measured this time."""
        assert self._child is not None, "launch comes first"
        number, self._num_measured = self._num_measured, self._num_measured + 1
        (self._folder / f"go-{number}").touch()
        found, began = self._folder / f"found-{number}.json", time.monotonic()
        while not found.exists():
            if self._child.process.poll() is not None:
                raise RuntimeError(self._child.tail())
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"vLLM alone did not end its calls within {limit_s:g} s")
            time.sleep(0.05)
        return json.loads(found.read_text())

    def end(self) -> None:
        """End its process where one is left."""
        if self._child is not None and self._child.process.poll() is None:
            self._child.end()


async def engine_alone(folder: Path) -> None:
    """Tokens per second of vLLM (or of the embedded engine in a rehearsal) given all calls at once, as often as it is asked."""
    from molt.config import Config
    from molt.rollout.spec import engine_specs

    known = json.loads((folder / "calls.json").read_text())
    config = Config.model_validate_json(known["config"])
    calls = [(prompt, count) for prompt, count in known["calls"]]
    spec = engine_specs(config)[0]
    os.environ.update(spec.env)
    generate, stop = await (_embedded(spec) if spec.kind == "embedded" else _vllm(spec))
    try:
        await asyncio.gather(*(generate(f"warm-{i}", *call) for i, call in enumerate(calls[: config.vllm.max_num_seqs])))
        for number in itertools.count():
            began = time.monotonic()
            while not (folder / f"go-{number}").exists():
                if time.monotonic() - began > GO_LIMIT_S:
                    return
                await asyncio.sleep(0.05)
            begun = time.perf_counter()
            counts = await asyncio.gather(*(generate(f"bare-{number}-{i}", *call) for i, call in enumerate(calls)))
            seconds = time.perf_counter() - begun
            found = {"tokens_per_s": sum(counts) / seconds, "n_sampled": sum(counts), "num_calls": len(calls)}
            (folder / "found.partial").write_text(json.dumps(found))
            os.replace(folder / "found.partial", folder / f"found-{number}.json")
    finally:
        await stop()


async def _vllm(spec: Any) -> tuple[Any, Any]:
    """AsyncLLM with the arguments of the run's engine: a call that samples exactly so many tokens, and its end."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from molt.rollout.vllm_engine import VllmEngine

    arguments = VllmEngine(spec.model_path, name="bare", max_len=spec.max_len, dtype=spec.dtype, **spec.options)._arguments
    for name in ("worker_extension_cls", "weight_transfer_config"):
        arguments.pop(name, None)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(name: str, prompt: list[int], count: int) -> int:
        params = SamplingParams(
            max_tokens=count,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            flat_logprobs=True,
        )
        length = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
            length = len(output.outputs[0].token_ids)
        return length

    async def stop() -> None:
        llm.shutdown()

    return generate, stop


async def _embedded(spec: Any) -> tuple[Any, Any]:
    """The same for the embedded engine."""
    from molt.rollout.engine import Sampling
    from molt.rollout.spec import make_engine

    engine = make_engine(spec)
    await engine.start()

    async def generate(name: str, prompt: list[int], count: int) -> int:
        sampling = Sampling(max_new_tokens=count, seed=hash(name) & 0x7FFFFFFF)
        return len((await engine.generate(name, prompt, sampling)).token_ids)

    return generate, engine.stop


def bare_steps(config: Any, plans: Sequence[Any], reader: Any, num_skipped: int) -> dict[str, Any]:
    """Tokens per second and MFU of fully_shard, cross-entropy, clip and AdamW over the packed rows of the plans."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from molt.learn.alone import alone
    from molt.learn.journal import read_rows
    from molt.learn.model import decoder_blocks, load_model
    from molt.learn.rows import micro_batches

    batches = []
    for plan in plans:
        rows = dict(enumerate(read_rows(reader, [row.segment_id for row in plan.segments])))
        batches.append([batch.packed for batch in micro_batches(plan, 0, rows)])
    with alone() as mesh:
        scorer = load_model(str(config.actor.model_name_or_path), config.actor, config.fsdp)
        lm = scorer.lm
        is_cuda = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        dtype = torch.bfloat16 if config.actor.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in decoder_blocks(lm):
            fully_shard(block, mesh=mesh.fsdp, mp_policy=policy)
        fully_shard(lm, mesh=mesh.fsdp, mp_policy=policy)
        optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, weight_decay=0.0)
        begun, n_tokens, flops = 0.0, 0, 0.0
        size = sum(parameter.numel() for parameter in lm.parameters())
        body = size - lm.get_input_embeddings().weight.numel()
        head = lm.get_output_embeddings().weight.numel()
        for number, micro in enumerate(batches):
            if number == num_skipped:
                if is_cuda:
                    torch.cuda.synchronize()
                begun, n_tokens, flops = time.perf_counter(), 0, 0.0
            for packed in (item.to(device) for item in micro):
                logits = lm(**scorer.inputs(packed), logits_to_keep=packed.index_N).logits[0]
                loss = F.cross_entropy(logits.float(), packed.target_N, reduction="sum") / 1000
                del logits
                loss.backward()
                count = packed.input_ids.shape[1]
                n_tokens += count
                flops += 6.0 * (body * count + head * len(packed.target_N))
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    return {"tokens_per_s": n_tokens / seconds, "mfu": flops / seconds / PEAK_FLOPS, "num_steps": len(batches) - num_skipped}


if __name__ == "__main__":
    asyncio.run(engine_alone(Path(sys.argv[1])))
