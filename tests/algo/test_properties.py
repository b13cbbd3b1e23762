"""Laws: the oracle agrees, and no cut, order or neighbour of a batch changes a result."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.algo.advantage import compute_advantages
from molt.algo.batch import RaggedBatch, sum_by_segment
from molt.algo.correction import importance_gate
from molt.algo.loss import policy_loss, token_scale
from molt.algo.rules import RATIO_BANDS
from tests.algo import reference
from tests.algo.build import algo, batch_of

PURE = ["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "flash_reinforce"]
REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1, -2.0, 0.5]))
ROLLOUT = st.fixed_dictionaries(
    {"group": st.sampled_from("abc"), "reward": REWARDS, "segments": st.lists(st.integers(0, 5), min_size=1, max_size=3)}
)
ROLLOUTS = st.lists(ROLLOUT, min_size=1, max_size=9)
FAST = settings(max_examples=60, deadline=None)


def num_tokens(rollouts):
    return sum(sum(r["segments"]) for r in rollouts)


def noise(n, seed, scale=0.3):
    return torch.tensor(np.random.default_rng(seed).normal(0.0, scale, n), dtype=torch.float32)


@FAST
@given(rollouts=ROLLOUTS, name=st.sampled_from(PURE))
def test_estimators_agree_with_the_oracle(rollouts, name):
    found = compute_advantages(name, batch_of(rollouts), algo()).advantages_T
    np.testing.assert_allclose(found.numpy(), reference.advantages(name, rollouts), rtol=1e-5, atol=1e-5)


@FAST
@given(rollouts=ROLLOUTS, gamma=st.sampled_from([1.0, 0.9, 0.0]), lambd=st.sampled_from([1.0, 0.8, 0.0]), seed=st.integers(0, 9))
def test_gae_agrees_with_the_oracle(rollouts, gamma, lambd, seed):
    values_T = noise(num_tokens(rollouts), seed, 1.0)
    penalty_T = noise(num_tokens(rollouts), seed + 1, 1.0)
    ends = np.cumsum([sum(r["segments"]) for r in rollouts])
    chosen = algo(advantage={"gamma": gamma, "lambd": lambd}, kl={"coef": 0.5, "use": "reward"})
    found = compute_advantages("gae", batch_of(rollouts), chosen, values_T=values_T, kl_T=penalty_T).advantages_T
    expected = reference.advantages(
        "gae",
        rollouts,
        gamma=gamma,
        lambd=lambd,
        values=np.split(values_T.double().numpy(), ends[:-1]),
        penalty=np.split(-0.5 * penalty_T.double().numpy(), ends[:-1]),
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


@FAST
@given(rollouts=ROLLOUTS, gamma=st.sampled_from([1.0, 0.9, 0.0]), seed=st.integers(0, 9))
def test_discounted_returns_agree_with_the_oracle(rollouts, gamma, seed):
    penalty_T = noise(num_tokens(rollouts), seed, 1.0)
    ends = np.cumsum([sum(r["segments"]) for r in rollouts])
    chosen = algo(advantage={"gamma": gamma}, kl={"coef": 0.5, "use": "reward"})
    found = compute_advantages("reinforce", batch_of(rollouts), chosen, kl_T=penalty_T).advantages_T
    penalty = np.split(-0.5 * penalty_T.double().numpy(), ends[:-1])
    np.testing.assert_allclose(
        found.numpy(), reference.advantages("reinforce", rollouts, gamma=gamma, penalty=penalty), rtol=1e-4, atol=1e-4
    )


@FAST
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 99), key=st.sampled_from(sorted(RATIO_BANDS)))
def test_ratio_gates_agree_with_the_oracle(lengths, seed, key):
    level, mode = key
    behaviour_T = -noise(sum(lengths), seed, 1.0).abs() - 0.01
    trainer_T = behaviour_T + noise(sum(lengths), seed + 1, 0.5)
    chosen = algo(advantage={"is_correction_level": level, "is_correction_mode": mode})
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    found = importance_gate(trainer_T, behaviour_T, segment_T, chosen)
    weights, kept = reference.gate(trainer_T.tolist(), behaviour_T.tolist(), lengths, level, mode, *RATIO_BANDS[key])
    np.testing.assert_allclose(found.weights_T.numpy(), weights, rtol=1e-5)
    assert found.is_kept_T.tolist() == kept.tolist()


@FAST
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    level=st.sampled_from(["token", "seq"]),
    kind=st.sampled_from(["kl", "tv"]),
)
def test_divergence_gates_agree_with_the_oracle(lengths, seed, level, kind):
    behaviour_T = -noise(sum(lengths), seed, 1.0).abs() - 0.01
    trainer_T = (behaviour_T + noise(sum(lengths), seed + 1, 0.5)).clamp(max=-1e-3)
    chosen = algo(advantage={"is_correction_level": level, "gate": kind, "is_correction_threshold": (None, 0.07)})
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    found = importance_gate(trainer_T, behaviour_T, segment_T, chosen)
    weights, kept = reference.gate(trainer_T.tolist(), behaviour_T.tolist(), lengths, level, "mask", None, 0.07, kind)
    np.testing.assert_allclose(found.weights_T.numpy(), weights, rtol=1e-5)
    assert found.is_kept_T.tolist() == kept.tolist()


@FAST
@given(rollouts=ROLLOUTS, seed=st.integers(0, 99), name=st.sampled_from(["ppo", "cispo", "gspo"]), dual=st.sampled_from([None, 1.5]))
def test_losses_agree_with_the_oracle(rollouts, seed, name, dual):
    n = num_tokens(rollouts)
    batch = batch_of(rollouts)
    old_T = -noise(n, seed, 1.0).abs()
    now_T, advantages_T = old_T + noise(n, seed + 1), noise(n, seed + 2, 1.0)
    dual = dual if name == "ppo" else None
    for aggregation in ("token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"):
        chosen = algo(loss={"name": name, "dual_clip": dual, "clip_high": 0.3})
        scale_T = token_scale(aggregation, batch)
        found = policy_loss(name, now_T, old_T, advantages_T, torch.ones(n), scale_T, chosen, segment_T=batch.segment_T).loss
        losses = reference.token_loss(name, now_T.tolist(), old_T.tolist(), advantages_T.tolist(), 0.2, 0.3, dual, batch.lengths_S.tolist())
        assert found.item() == pytest.approx((losses * reference.scale(aggregation, rollouts)).sum(), rel=1e-4, abs=1e-5)


@FAST
@given(rollouts=ROLLOUTS, name=st.sampled_from(PURE), data=st.data())
def test_the_order_of_rollouts_changes_no_advantage(rollouts, name, data):
    order = data.draw(st.permutations(range(len(rollouts))))
    straight = compute_advantages(name, batch_of(rollouts), algo()).advantages_T
    moved = compute_advantages(name, batch_of([rollouts[i] for i in order]), algo()).advantages_T
    bounds = [0, *itertools.accumulate(sum(r["segments"]) for r in rollouts)]
    expected = torch.cat([straight[bounds[i] : bounds[i + 1]] for i in order])
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)


@FAST
@given(rollouts=ROLLOUTS, name=st.sampled_from(PURE), data=st.data())
def test_cutting_rollouts_into_segments_changes_no_advantage(rollouts, name, data):
    whole = [r | {"segments": [sum(r["segments"])]} for r in rollouts]
    cut = compute_advantages(name, batch_of(rollouts), algo()).advantages_T
    assert torch.equal(cut, compute_advantages(name, batch_of(whole), algo()).advantages_T)


@FAST
@given(rollouts=ROLLOUTS, name=st.sampled_from([*PURE, "gae"]), seed=st.integers(0, 9))
def test_padding_changes_nothing(rollouts, name, seed):
    # padding: after each segment two slots that may not train, with junk in every column
    n, rng = num_tokens(rollouts), np.random.default_rng(seed)
    chosen = algo(kl={"coef": 0.1, "use": "reward"})
    columns = {"values_T": noise(n, seed, 1.0), "kl_T": noise(n, seed + 1, 1.0)}
    plain = batch_of(rollouts)
    expected = compute_advantages(name, plain, chosen, **columns).advantages_T
    real_T = torch.cat([torch.tensor([True] * int(k) + [False] * 2) for k in plain.lengths_S])
    junk = {key: torch.tensor(rng.normal(0, 1e6, len(real_T)), dtype=torch.float32) for key in columns}
    for key, column in columns.items():
        junk[key][real_T] = column
    padded = batch_of(rollouts, lengths_S=plain.lengths_S + 2, is_trainable_T=real_T)
    found = compute_advantages(name, padded, chosen, **junk).advantages_T
    assert torch.equal(found[real_T], expected)
    assert (found[~real_T] == 0).all()


@FAST
@given(rollouts=ROLLOUTS, seed=st.integers(0, 99), key=st.sampled_from(sorted(RATIO_BANDS)), data=st.data())
def test_any_cut_into_micro_batches_adds_up(rollouts, seed, key, data):
    """Gate and loss on any partition of whole segments, in any order: the same weights bit for bit, the same gradient."""
    level, mode = key
    n, batch = num_tokens(rollouts), batch_of(rollouts)
    old_T = -noise(n, seed, 1.0).abs()
    behaviour_T, advantages_T = old_T + noise(n, seed + 1, 0.2), noise(n, seed + 2, 1.0)
    scale_T = token_scale("token-mean", batch)
    for name in ("ppo", "gspo"):
        chosen = algo(advantage={"is_correction_level": level, "is_correction_mode": mode}, loss={"name": name})

        def run(segments, leaf_T, chosen=chosen, name=name):
            keep_T = torch.isin(batch.segment_T, torch.tensor(segments, dtype=torch.int64))
            _, local_T = torch.unique(batch.segment_T[keep_T], return_inverse=True)
            gate = importance_gate(old_T[keep_T], behaviour_T[keep_T], local_T, chosen)
            output = policy_loss(
                name, leaf_T[keep_T], old_T[keep_T], advantages_T[keep_T], gate.weights_T, scale_T[keep_T], chosen, segment_T=local_T
            )
            output.loss.backward()
            return keep_T, gate.weights_T

        whole = (old_T + noise(n, seed + 3)).requires_grad_()
        _, weights_T = run(list(range(batch.num_segments)), whole)
        order = data.draw(st.permutations(range(batch.num_segments)))
        cuts = sorted(data.draw(st.sets(st.integers(0, batch.num_segments), max_size=3)))
        parts = [order[a:b] for a, b in itertools.pairwise([0, *cuts, batch.num_segments])]
        cut = whole.detach().clone().requires_grad_()
        for part in parts:
            keep_T, part_T = run(sorted(part), cut)
            assert torch.equal(part_T, weights_T[keep_T])
        if n:
            torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-6, atol=1e-7)


@FAST
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_both_ways_of_adding_up_a_segment_give_the_same_bits(lengths, seed):
    # the second is what a GPU takes
    values_T = noise(sum(lengths), seed, 1.0).double()
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    by_thread = torch.segment_reduce(values_T, "sum", lengths=torch.tensor(lengths))
    assert torch.equal(sum_by_segment(values_T, segment_T, len(lengths)), by_thread)


def test_batches_pickle():
    batch = batch_of([{"group": "a", "reward": 1.0, "segments": [2]}])
    again = pickle.loads(pickle.dumps(batch))
    assert isinstance(again, RaggedBatch) and torch.equal(again.segment_T, batch.segment_T)
