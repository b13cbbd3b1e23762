"""A training step against a bare FSDP2 loop on the same packed rows, in one run: tokens/s of both, and where the difference goes.

    python tools/bench/train.py [--hidden 128] [--layers 2] [--rows 32] [--length 128] [--steps 5] [--dtype float32]

The step reads its rows from a durable log (digests checked), scores, gates, learns, appends scores and gate decisions, and digests the
weights when asked to. The bare loop has the rows in memory: forward, cross entropy over the sampled tokens, backward, clip, AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from molt.admission.balance import balance
from molt.admission.plan import SegmentRow, StepPlan
from molt.config import Config
from molt.learn.alone import alone
from molt.learn.journal import LogJournal
from molt.learn.mesh import RankMesh
from molt.learn.model import load_model
from molt.learn.packing import Packed
from molt.learn.policy import Policy
from molt.learn.rank import PolicyRank
from molt.learn.rows import micro_batches
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Segment, Span, TokenSource
from molt.log.writer import LogWriter

VOCAB = 8192


def main() -> None:
    """Run both and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--digest", action="store_true", help="digest the weights after each step, as train.weights_digest_interval=1 does")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, alone() as mesh:
        print(json.dumps(_measure(options, Path(folder), mesh), indent=1))


def _measure(options: argparse.Namespace, folder: Path, mesh: RankMesh) -> dict[str, Any]:
    _make_model(folder / "model", options.hidden, options.layers)
    config = Config.model_validate(
        {
            "actor": {"model_name_or_path": str(folder / "model"), "dtype": options.dtype, "implementation": "hf"},
            "data": {"max_len": options.length},
            "train": {"micro_batch_tokens": 8192, "weights_digest_interval": int(options.digest)},
            "algo": {"advantage": {"estimator": "grpo", "is_correction_level": "token", "is_correction_mode": "trunc"}},
        }
    )
    segments = _segments(options.rows, options.length)
    n_tokens = options.rows * options.length
    writer = LogWriter.open(folder / "run", run="run", attempt=1, store="durable")
    try:
        Producer(writer, "bench").append_sync(segments=segments)
        journal = LogJournal(config, LogReader.open(folder / "run"), Producer(writer, "rank"))
        rank = PolicyRank(config, _policy(config, mesh), journal, rank=0)
        results: list[Any] = []
        step_s = _median_s(lambda step: results.append(rank.train(_plan(segments, step))), options.steps)
        packed = [
            batch.packed for batch in micro_batches(_plan(segments, 0), 0, dict(enumerate(journal.read([s.segment_id for s in segments]))))
        ]
    finally:
        writer.close()
    bare = _Bare(config, mesh)
    bare_s = _median_s(lambda step: bare.step(packed), options.steps)
    log_s = statistics.median(result.log_s for result in results[1:])
    return {
        "tokens_per_step": n_tokens,
        "step_tokens_per_s": round(n_tokens / step_s),
        "bare_tokens_per_s": round(n_tokens / bare_s),
        "ratio": round(bare_s / step_s, 4),
        "log_s": round(log_s, 4),
        "log_share": round(log_s / step_s, 4),
        "device": str(rank.policy.device),
        "refused": [str(result.refused) for result in results if result.refused is not None],
    }


class _Bare:
    """The plain loop: no log, no gate, no record."""

    def __init__(self, config: Config, mesh: RankMesh) -> None:
        self.policy = _policy(config, mesh)
        self.lm = self.policy.scorer.lm

    def step(self, batches: list[Packed]) -> None:
        n_sampled = sum(len(packed.target_N) for packed in batches)
        for packed in batches:
            on_device = packed.to(self.policy.device)
            logits = self._logits(on_device)
            (F.cross_entropy(logits.float(), on_device.target_N, reduction="sum") / n_sampled).backward()
        self.policy.update()

    def _logits(self, packed: Packed) -> torch.Tensor:
        """All logits of the sampled tokens at once, as a plain loop makes them. Called through the root, so that it is gathered."""
        self.policy.scorer.has_plain_head = False
        found: list[torch.Tensor] = []
        hook = self.lm.register_forward_hook(lambda _module, _inputs, output: found.append(output.logits[0]))
        self.policy.scorer(packed)
        hook.remove()
        return found[0]


def _median_s(step: Callable[[int], Any], count: int) -> float:
    """Median seconds of a step after one to warm up."""
    seconds = []
    for number in range(count + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def _policy(config: Config, mesh: RankMesh) -> Policy:
    scorer = load_model(str(config.actor.model_name_or_path), config.actor, config.fsdp)
    return Policy(scorer, config.actor, config.fsdp, mesh=mesh, num_steps=100)


def _make_model(folder: Path, hidden: int, layers: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(1, hidden // 64)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    config = Qwen3Config(
        vocab_size=VOCAB, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), tie_word_embeddings=True, **sizes
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _segments(count: int, length: int) -> list[Segment]:
    """Rollouts of one segment: a quarter prompt, the rest sampled, in groups of eight."""
    generator = np.random.default_rng(0)
    prompt = length // 4
    logprobs = np.full(length, np.nan, np.float32)
    made = []
    for number in range(count):
        group, member = divmod(number, 8)
        logprobs[prompt:] = generator.normal(-9.0, 0.1, length - prompt)
        made.append(
            Segment(
                rollout_id=f"e0-p{group}/{member}/0",
                group_id=f"e0-p{group}",
                segment_index=0,
                num_segments=1,
                member=member,
                group_size=8,
                prompt_id=str(group),
                prompt_index=group,
                epoch=0,
                token_ids=generator.integers(0, VOCAB, length).astype(np.int32),
                behaviour_logprobs=logprobs.copy(),
                spans=[
                    Span(len=prompt, source=TokenSource.USER),
                    Span(len=length - prompt, source=TokenSource.POLICY, trainable=True, policy_version=0, kv_version=0),
                ],
                reward=float(number % 2),
                is_terminated=True,
                is_truncated=False,
                stop_reason="terminated",
                temperature=1.0,
                engine="bench",
                tokenizer_digest="",
                template_digest="",
                started_at=0.0,
                finished_at=0.0,
            )
        )
    return made


def _plan(segments: list[Segment], step: int) -> StepPlan:
    """One step over all segments on one rank."""
    rows = tuple(
        SegmentRow(
            segment_id=s.segment_id,
            rollout_id=s.rollout_id,
            group_id=s.group_id,
            prompt_index=s.prompt_index,
            lsn=0,
            n_tokens=s.n_tokens,
            n_sampled=s.n_sampled,
            version_min=0,
            version_max=0,
            reward=s.reward,
            outcome=None,
            is_truncated=False,
        )
        for s in segments
    )
    cut = balance([row.n_tokens for row in rows], num_ranks=1, micro_batch_tokens=8192)
    plan = StepPlan(
        step=0,
        policy_version=0,
        seed=0,
        segments=rows,
        micro_batches=cut,
        n_sampled=sum(row.n_sampled for row in rows),
        num_rollouts=len(rows),
        num_groups=len({row.group_id for row in rows}),
        cursor=0,
    )
    return replace(plan, step=step, policy_version=step)


if __name__ == "__main__":
    main()
