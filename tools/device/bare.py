"""The other side of each ratio: vLLM alone, and a plain FSDP2 loop over the same packed rows, without anything of Molt's loop.

python -m tools.device.bare CALLS.json     (vLLM alone; prints one JSON line)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEAK_FLOPS = 989e12
"""Dense bf16 of one H200, by its data sheet."""


def bare_engine(file: Path, log: Path, *, limit_s: float) -> dict[str, Any]:
    """Run this module on the calls; what it measured."""
    from tools.device.parts import Child

    child = Child([sys.executable, "-m", "tools.device.bare", str(file)], log=log)
    if child.wait(limit_s) != 0:
        raise RuntimeError(child.tail())
    return json.loads(child.log.read_text().strip().splitlines()[-1])


async def engine_alone(file: Path) -> dict[str, Any]:
    """Tokens per second of vLLM (or of the embedded engine in a rehearsal) given all calls at once."""
    from molt.config import Config
    from molt.rollout.spec import engine_specs

    known = json.loads(file.read_text())
    config = Config.model_validate_json(known["config"])
    spec = engine_specs(config)[0]
    calls = [(prompt, count) for prompt, count in known["calls"]]
    if spec.kind == "embedded":
        return await _embedded(spec, calls)
    import os

    os.environ.update(spec.env)
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from molt.rollout.vllm_engine import VllmEngine

    arguments = VllmEngine(spec.model_path, name="bare", max_len=spec.max_len, dtype=spec.dtype, **spec.options)._arguments
    arguments.pop("worker_extension_cls")
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def call(name: str, prompt: list[int], count: int) -> int:
        params = SamplingParams(
            max_tokens=count,
            temperature=1.0,
            seed=1,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        length = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
            length = len(output.outputs[0].token_ids)
        return length

    try:
        await asyncio.gather(*(call(f"warm-{i}", *calls[i]) for i in range(min(32, len(calls)))))
        began = time.perf_counter()
        counts = await asyncio.gather(*(call(f"bare-{i}", *pair) for i, pair in enumerate(calls)))
        return {"bare_tokens_per_s": sum(counts) / (time.perf_counter() - began)}
    finally:
        llm.shutdown()


async def _embedded(spec: Any, calls: list[tuple[list[int], int]]) -> dict[str, Any]:
    from molt.rollout.engine import Sampling
    from molt.rollout.spec import make_engine

    engine = make_engine(spec)
    await engine.start()
    began = time.perf_counter()
    done = await asyncio.gather(
        *(engine.generate(f"bare-{i}", prompt, Sampling(max_new_tokens=count, seed=i)) for i, (prompt, count) in enumerate(calls))
    )
    seconds = time.perf_counter() - began
    await engine.stop()
    return {"bare_tokens_per_s": sum(len(generation.token_ids) for generation in done) / seconds}


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
    print("\n" + json.dumps(asyncio.run(engine_alone(Path(sys.argv[1])))))
