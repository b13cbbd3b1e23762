"""One rank's step: the same whatever the cut, refused where it must be, the same twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from molt.errors import LogError
from molt.learn import tally
from molt.learn.journal import Outgoing, Write
from molt.learn.result import RefusalReason
from tests.learn.tiny import VOCAB, make_config, make_plan, make_rank, make_rows


def weights_of(rank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in rank.policy.full_tensors().items()}


def test_step_is_the_same_twice_bit_for_bit(model: Path) -> None:
    rows, results, weights = make_rows(6), [], []
    for _ in range(2):
        rank = make_rank(make_config(model), rows)
        results.append([rank.train(make_plan(rows, step=step)) for step in range(3)])
        weights.append(weights_of(rank))
    assert [r.loss_digest for r in results[0]] == [r.loss_digest for r in results[1]]
    assert [r.weights_digest for r in results[0]] == [r.weights_digest for r in results[1]]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_step_does_not_depend_on_the_micro_batch_split(model: Path) -> None:
    rows = make_rows(6)
    whole, cut = make_rank(make_config(model), rows), make_rank(make_config(model), rows)
    a, b = whole.train(make_plan(rows, micro_batch_tokens=1000)), cut.train(make_plan(rows, micro_batch_tokens=16))
    # float32 sums in another order; the gradient norm is of order 1
    assert abs(a.loss - b.loss) < 1e-6
    assert abs(a.grad_norm - b.grad_norm) < 1e-5 * max(1.0, a.grad_norm)
    assert a.batch_digest == b.batch_digest
    assert len(a.uses) == len(b.uses) == 6


def test_reward_raises_the_log_prob_of_what_was_rewarded(model: Path) -> None:
    rows = make_rows(4)
    rank = make_rank(make_config(model), rows)
    plan = make_plan(rows)
    first = rank.train(plan)
    before = rank.journal.written[-1].columns.logprobs
    for step in range(1, 6):
        rank.train(make_plan(rows, step=step))
    after = rank.journal.written[-1].columns.logprobs
    signs = torch.cat(
        [torch.full((s.n_sampled,), 1.0 if s.reward else -1.0) for p in plan.micro_batches[0] for s in [plan.segments[i] for i in p]]
    )
    assert first.refused is None
    assert float(((torch.cat(after) - torch.cat(before)) * signs).mean()) > 0


def test_missing_logprob_of_a_trainable_token_refuses_the_step(model: Path) -> None:
    rows = make_rows(4)
    bad = rows[2].behaviour_logprobs.copy()
    bad[4] = np.nan
    rows[2] = replace(rows[2], behaviour_logprobs=bad)
    rank = make_rank(make_config(model), rows)
    before = weights_of(rank)
    result = rank.train(make_plan(rows))
    assert result.refused is not None and result.refused.reason is RefusalReason.LINEAGE
    assert rows[2].segment_id in result.refused.error and "token 4" in result.refused.error
    assert all(torch.equal(before[name], now) for name, now in weights_of(rank).items())


@pytest.mark.parametrize("stray", [-1, VOCAB, 2**31 - 1])
def test_id_that_the_model_does_not_know_refuses_the_step(model: Path, stray: int) -> None:
    """A log of another model. A GPU would end the process at such an id, and a sharded embedding takes it without a word."""
    rows = make_rows(4)
    ids = rows[1].token_ids.copy()
    ids[0] = stray
    rows[1] = replace(rows[1], token_ids=ids)
    refused = make_rank(make_config(model), rows).train(make_plan(rows)).refused
    assert refused is not None and refused.reason is RefusalReason.LINEAGE
    assert f"{rows[1].segment_id}, token 0 (id {stray})" in refused.error and f"below {VOCAB}" in refused.error


def test_everyone_who_asks_hears_why_a_step_did_not_reach_the_log() -> None:
    outgoing = Outgoing()

    def encode() -> Write:
        def write() -> None:
            raise LogError("no space left")

        return write

    outgoing.hold(outgoing.pool.submit(encode))
    for _ in range(2):
        with pytest.raises(LogError, match="no space left"):
            outgoing.settle()


@pytest.mark.parametrize(
    ("changes", "why"), [({"top_p": 0.9}, "top_p=0.9"), ({"top_k": 5}, "top_k=5"), ({"logprobs_mode": "none"}, "logprobs_mode=none")]
)
def test_tokens_of_another_distribution_are_refused_under_correction(model: Path, changes: dict[str, Any], why: str) -> None:
    rows = make_rows(4)
    rows[1] = replace(rows[1], **changes)
    for level in ("token", "off"):
        algo = {"advantage": {"estimator": "grpo", "is_correction_level": level, "is_correction_mode": "trunc"}}
        refused = make_rank(make_config(model, algo=algo), rows).train(make_plan(rows)).refused
        if level == "off":
            assert refused is None
        else:
            assert refused is not None and refused.reason is RefusalReason.LINEAGE
            assert rows[1].segment_id in refused.error and why in refused.error


def test_fully_rejected_batch_does_not_step(model: Path) -> None:
    rows = make_rows(4)
    config = make_config(
        model, algo={"advantage": {"estimator": "grpo", "is_correction_level": "geo", "is_correction_threshold": (0.9999, 1.0001)}}
    )
    rank = make_rank(config, rows)
    before = weights_of(rank)
    result = rank.train(make_plan(rows))
    assert result.refused is not None and result.refused.reason is RefusalReason.NOTHING_KEPT
    assert result.n_kept == 0 and result.n_sampled > 0
    assert rank.policy.num_updates == 0
    assert all(torch.equal(before[name], now) for name, now in weights_of(rank).items())


def test_non_finite_weights_refuse_the_step_and_name_the_token(model: Path) -> None:
    rows = make_rows(4)
    rank = make_rank(make_config(model), rows)
    with torch.no_grad():
        next(iter(rank.policy.scorer.parameters())).to_local()[3] = float("nan")
    rows_hit = [r.segment_id for r in rows if 3 in r.token_ids] or [r.segment_id for r in rows]
    result = rank.train(make_plan(rows))
    assert result.refused is not None and result.refused.reason is RefusalReason.NON_FINITE
    assert any(name in result.refused.error for name in rows_hit)
    assert rank.policy.num_updates == 0


def test_offloaded_optimizer_gives_the_same_weights(model: Path) -> None:
    rows, digests = make_rows(4), []
    for offload in ("none", "optimizer"):
        rank = make_rank(make_config(model, fsdp={"offload": offload}), rows)
        digests.append([rank.train(make_plan(rows, step=step)).weights_digest for step in range(3)])
    assert digests[0] == digests[1]
    assert rank.policy.is_optimizer_offloaded


def test_schedule_counts_steps_and_not_the_passes_over_their_batches(model: Path) -> None:
    rows, actor = make_rows(4), {"learning_rate": 8e-3, "schedule": "linear", "warmup_steps": 1}
    rank = make_rank(make_config(model, actor={"model_name_or_path": str(model)} | actor, train={"epochs_per_batch": 2}), rows, num_steps=3)
    rates = [rank.train(make_plan(rows, step=step)).learning_rate for step in range(3)]
    # Six updates, of which two rise to 8e-3 (4e-3, 8e-3) and four fall to 0 (8, 6, 4, 2); each step tells that of its last one.
    assert rates == pytest.approx([8e-3, 6e-3, 2e-3])


def test_second_pass_over_a_batch_is_held_to_the_log_probs_of_its_start(model: Path) -> None:
    rows = make_rows(6)
    once, twice = make_rank(make_config(model), rows), make_rank(make_config(model, train={"epochs_per_batch": 2}), rows)
    a, b = once.train(make_plan(rows)), twice.train(make_plan(rows))
    assert (once.policy.num_updates, twice.policy.num_updates) == (1, 2)
    assert a.loss_digest == b.loss_digest  # what is recorded is the first pass
    assert all(torch.equal(x, y) for x, y in zip(*(r.journal.written[-1].columns.logprobs for r in (once, twice)), strict=True))
    assert a.weights_digest != b.weights_digest


def test_memory_is_told_of_the_fullest_rank(model: Path) -> None:
    # One rank may hold more of each than the others, and not the same one of both.
    ranks = [
        {"max_memory_allocated_gib": 3.0, "max_memory_reserved_gib": 8.0},
        {"max_memory_allocated_gib": 4.0, "max_memory_reserved_gib": 5.0},
    ]
    assert tally.fullest(ranks) == {"max_memory_allocated_gib": 4.0, "max_memory_reserved_gib": 8.0}
    rows = make_rows(4)
    assert not any("memory" in name for name in make_rank(make_config(model), rows).train(make_plan(rows)).metrics)  # no GPU, no figure
