"""A tiny Qwen3-shaped model, rows as a rollout would leave them, and a journal in memory at the trainer's seam to the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from molt.admission.balance import balance
from molt.admission.plan import SegmentRow, StepPlan
from molt.config import Config
from molt.learn.mesh import make_mesh
from molt.learn.model import load_model
from molt.learn.policy import Policy
from molt.learn.rank import PolicyRank
from molt.learn.rows import Row
from molt.learn.step import Step
from molt.log.rows import Segment, Span, TokenSource

VOCAB = 97


def make_model(folder: Path, *, tied: bool = True, seed: int = 0, num_entries: int = VOCAB) -> Path:
    """A random dense model of about 60,000 parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=num_entries,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_moe(folder: Path, *, seed: int = 0, num_entries: int = VOCAB, num_layers: int = 2, dense_layers: Sequence[int] = ()) -> Path:
    """A random mixture of experts: two layers of eight experts, two for a token. dense_layers: layers without experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=num_entries,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=num_layers,
        mlp_only_layers=list(dense_layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_config(model: Path, **changes: dict[str, Any]) -> Config:
    """Settings for tests: a fast learner, a tight band of micro-batches."""
    rooms: dict[str, dict[str, Any]] = {
        "actor": {"model_name_or_path": str(model), "learning_rate": 1e-2},
        "algo": {"advantage": {"estimator": "grpo"}},
        "train": {"micro_batch_tokens": 64},
        "data": {"max_len": 64},
    }
    for room, values in changes.items():
        rooms[room] = rooms.get(room, {}) | values
    return Config.model_validate(rooms)


def make_rows(count: int, *, seed: int = 0, version: int = 0) -> list[Row]:
    """Rows of 5 to 16 tokens: a prompt, sampled tokens, an observation of two, sampled tokens. Behaviour log-probs are made up."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(generator.integers(8, 17))
        is_sampled = np.arange(length) >= 3
        is_sampled[5:7] = False
        logprobs = np.where(is_sampled, generator.normal(-4.5, 0.2, length), np.nan).astype(np.float32)
        rows.append(
            Row(
                segment_id=f"e0-p{number // 2}/{number % 2}/1/0",
                token_ids=generator.integers(0, VOCAB, length).astype(np.int32),
                is_sampled=is_sampled,
                is_trainable=is_sampled.copy(),
                behaviour_logprobs=logprobs,
                policy_versions=np.where(is_sampled, version, -1).astype(np.int32),
                temperature=1.0,
            )
        )
    return rows


def make_plan(
    rows: Sequence[Row], *, step: int = 0, num_ranks: int = 1, micro_batch_tokens: int = 64, rewards: Sequence[float | None] | None = None
) -> StepPlan:
    """A plan over those rows; rewards alternate 1 and 0 within a group unless given."""
    segments = tuple(
        SegmentRow(
            segment_id=row.segment_id,
            rollout_id=row.segment_id.rsplit("/", 1)[0],
            group_id=row.segment_id.split("/")[0],
            prompt_index=number // 2,
            lsn=number,
            n_tokens=len(row.token_ids),
            n_sampled=int(row.is_sampled.sum()),
            version_min=0,
            version_max=0,
            reward=float(1 - number % 2) if rewards is None else rewards[number],
            outcome=None,
            is_truncated=False,
        )
        for number, row in enumerate(rows)
    )
    return StepPlan(
        step=step,
        policy_version=step,
        seed=0,
        segments=segments,
        micro_batches=balance([s.n_tokens for s in segments], num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens),
        n_sampled=sum(s.n_sampled for s in segments),
        num_rollouts=len({s.rollout_id for s in segments}),
        num_groups=len({s.group_id for s in segments}),
        cursor=len(segments),
    )


@dataclass
class MemoryJournal:
    """The journal of molt.learn.journal over rows in memory."""

    rows: dict[str, Row]
    written: list[Step] = field(default_factory=list)

    def read(self, segment_ids: Sequence[str]) -> list[Row]:
        return [self.rows[segment_id] for segment_id in segment_ids]

    def scores(self, step: Step, rank: int) -> Callable[[], None]:
        self.written.append(step)
        return lambda: None

    def compare_step(self, *args: Any) -> None:
        return None


def make_rank(config: Config, rows: Sequence[Row], *, num_steps: int = 10) -> PolicyRank:
    """A rank in this process; its process group must exist."""
    mesh = make_mesh(config.fsdp.model_copy(update={"num_ranks": dist.get_world_size()}), "cpu")
    scorer = load_model(config.actor.model_name_or_path or "", config.actor, config.fsdp, is_deferred=True)
    passes = config.train.epochs_per_batch
    policy = Policy(scorer, config.actor, config.fsdp, mesh=mesh, num_steps=num_steps, updates_per_step=passes)
    return PolicyRank(config, policy, MemoryJournal({row.segment_id: row for row in rows}), rank=dist.get_rank())


def to_segments(rows: Sequence[Row], rewards: Sequence[float] | None = None) -> list[Segment]:
    """Rows as finished rollouts of the log, one segment each."""
    return [_segment(row, number, float(1 - number % 2) if rewards is None else rewards[number]) for number, row in enumerate(rows)]


def _segment(row: Row, number: int, reward: float) -> Segment:
    group_id, member, attempt, _ = row.segment_id.split("/")
    return Segment(
        rollout_id=f"{group_id}/{member}/{attempt}",
        group_id=group_id,
        segment_index=0,
        num_segments=1,
        member=int(member),
        group_size=2,
        prompt_id=group_id,
        prompt_index=number // 2,
        epoch=0,
        token_ids=row.token_ids,
        behaviour_logprobs=row.behaviour_logprobs,
        spans=[
            Span(
                len=len(list(run)),
                source=TokenSource.POLICY if version >= 0 else TokenSource.USER,
                trainable=version >= 0,
                policy_version=version if version >= 0 else None,
                kv_version=version if version >= 0 else None,
            )
            for version, run in groupby(row.policy_versions.tolist())
        ],
        reward=reward,
        is_terminated=True,
        is_truncated=False,
        stop_reason="terminated",
        temperature=row.temperature,
        engine="test",
        tokenizer_digest="t",
        template_digest="t",
        started_at=0.0,
        finished_at=1.0,
    )
