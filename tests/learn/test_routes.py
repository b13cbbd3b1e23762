"""Routing replay: the engine's experts are taken by absolute position, unknown ones stay live, the router still learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from molt.config import ActorSettings, FsdpSettings
from molt.errors import LineageError, SettingError
from molt.learn.model import TokenScorer, load_model
from molt.learn.packing import dummy, pack
from molt.learn.result import RefusalReason
from molt.learn.routes import RouteCounts, Routes, pack_routes
from molt.learn.rows import Row
from tests.learn.tiny import make_config, make_moe, make_plan, make_rank, make_rows

NUM_LAYERS, TOP_K, NUM_EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("moe"))


def scorer_of(moe: Path, *, checkpointing: bool = False) -> TokenScorer:
    scorer = load_model(str(moe), ActorSettings(gradient_checkpointing=checkpointing), FsdpSettings())
    scorer.routes = Routes.install(scorer.lm)
    return scorer


def live_routes(moe: Path, rows: list[Row]) -> list[np.ndarray]:
    """What the routers choose by themselves, row by row: what an engine with the same weights would report."""
    scorer, chosen = scorer_of(moe), []
    assert scorer.routes is not None
    for slot in scorer.routes.slots:
        original = slot.apply
        slot.apply = lambda live, original=original: chosen.append(live.clone()) or original(live)  # type: ignore[method-assign]
    found = []
    for row in rows:
        chosen.clear()
        scorer(pack([row.token_ids], [row.is_sampled]))
        found.append(torch.stack(chosen, 1).numpy().astype(np.int16))
    return found


def test_replaying_what_the_router_would_choose_changes_nothing(moe: Path) -> None:
    rows = make_rows(3)
    scorer, ids, masks = scorer_of(moe), [r.token_ids for r in rows], [r.is_sampled for r in rows]
    plain = load_model(str(moe), ActorSettings(), FsdpSettings())
    live = plain(pack(ids, masks))[0].detach()
    replayed = scorer(pack(ids, masks, routes=list(live_routes(moe, rows))))[0].detach()
    assert torch.equal(live, replayed)
    counts = scorer.routes.take_counts() if scorer.routes else []
    assert all(c.n_replayed == sum(map(len, ids)) and c.overlap == c.n_replayed for c in counts)


def test_observed_routes_are_compared_and_change_nothing(moe: Path) -> None:
    rows = make_rows(2)
    ids, masks = [r.token_ids for r in rows], [r.is_sampled for r in rows]
    scorer = scorer_of(moe)
    live = scorer(pack(ids, masks))[0].detach()
    assert scorer.routes is not None
    scorer.routes.take_counts()
    scorer.routes.observe(is_replayed=False)
    # One of the two experts of every token is another: half of them agree.
    other = live_routes(moe, rows)[0].copy()
    other[..., 1] = [[next(e for e in range(NUM_EXPERTS) if e not in layer) for layer in token] for token in other.tolist()]
    observed = scorer(pack(ids, masks, routes=[other, None]))[0].detach()
    assert torch.equal(live, observed)
    assert [c.overlap / c.n_replayed for c in scorer.routes.take_counts()] == [0.5] * NUM_LAYERS


def test_other_experts_give_other_log_probs_and_unknown_rows_stay_live(moe: Path) -> None:
    rows = make_rows(2)
    ids, masks = [r.token_ids for r in rows], [r.is_sampled for r in rows]
    scorer = scorer_of(moe)
    live = scorer(pack(ids, masks))[0].detach()
    other = (live_routes(moe, rows)[0] + 1) % NUM_EXPERTS
    packed = pack(ids, masks, routes=[other, None])
    replayed = scorer(packed)[0].detach()
    assert not torch.equal(live[packed.row_N == 0], replayed[packed.row_N == 0])
    # the experts' matrix products have other shapes now, so the last bits may differ
    assert torch.allclose(live[packed.row_N == 1], replayed[packed.row_N == 1], atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_router_gets_a_gradient_for_experts_that_it_would_not_choose(moe: Path, checkpointing: bool) -> None:
    rows = make_rows(1)
    scorer = scorer_of(moe, checkpointing=checkpointing)
    # the recorded experts differ from the live ones everywhere: each is shifted by one
    routes = (live_routes(moe, rows)[0] + 1) % NUM_EXPERTS
    logprobs, _ = scorer(pack([rows[0].token_ids], [rows[0].is_sampled], routes=[routes]))
    logprobs.sum().backward()
    gradients = {n: p.grad for n, p in scorer.named_parameters() if n.endswith("mlp.gate.weight")}
    assert len(gradients) == NUM_LAYERS
    for gradient in gradients.values():
        assert gradient is not None and bool((gradient.abs().sum(-1)[sorted(set(routes[:, 0].flatten().tolist()))] > 0).any())


def test_checkpointed_backward_replays_the_same_experts(moe: Path) -> None:
    rows = make_rows(1)
    routes = (live_routes(moe, rows)[0] + 3) % NUM_EXPERTS
    gradients = []
    for checkpointing in (False, True):
        scorer = scorer_of(moe, checkpointing=checkpointing)
        scorer(pack([rows[0].token_ids], [rows[0].is_sampled], routes=[routes]))[0].sum().backward()
        gradients.append({n: p.grad.clone() for n, p in scorer.named_parameters() if p.grad is not None})
    assert all(torch.allclose(gradients[0][n], gradients[1][n], atol=1e-6) for n in gradients[0])


def test_routes_shorter_than_the_row_end_in_unknown() -> None:
    # the engine does not forward the last sampled token: three tokens, two rows of routes
    packed = pack_routes([np.zeros((2, 1, 2), np.int16), None], [3, 2])
    assert packed is not None and packed[:, 0, 0].tolist() == [0, 0, -1, -1, -1]
    with pytest.raises(LineageError, match="routes of 4 tokens for a segment of 3"):
        pack_routes([np.zeros((4, 1, 2), np.int16)], [3])


def test_expert_ids_beyond_255_survive() -> None:
    routes = np.array([[[0, 255]], [[256, 511]], [[-1, -1]]], np.int16)
    packed = pack_routes([routes], [3])
    assert packed is not None and packed.flatten().tolist() == [0, 255, 256, 511, -1, -1]


def test_step_counts_what_was_replayed_and_refuses_routes_of_another_model(moe: Path) -> None:
    rows = make_rows(4)
    routes = live_routes(moe, rows)
    mixed = [replace(row, routes=None if i == 3 else routes[i]) for i, row in enumerate(rows)]
    config = make_config(moe, train={"routing_replay": True})
    result = make_rank(config, mixed).train(make_plan(rows))
    n_known = sum(len(r.token_ids) for r in rows[:3])
    assert result.refused is None
    assert result.metrics["replayed_share"] == pytest.approx(n_known / sum(len(r.token_ids) for r in rows))
    assert result.metrics["expert_agreement_min"] == 1.0
    for bad, message in ((routes[0][:, :1], "routes of 1 layers"), (np.full_like(routes[0], 8), "expert 8 of 8")):
        refused = make_rank(config, [replace(rows[0], routes=bad), *mixed[1:]]).train(make_plan(rows)).refused
        assert refused is not None and refused.reason is RefusalReason.LINEAGE and message in refused.error
    refused = make_rank(config, rows).train(make_plan(rows)).refused
    assert refused is not None and "no segment of the batch has routed experts" in refused.error


def test_layer_that_agrees_no_better_than_chance_is_named(moe: Path) -> None:
    routes = Routes.install(load_model(str(moe), ActorSettings(), FsdpSettings()).lm)
    for slot, share in zip(routes.slots, (0.9, 0.3), strict=True):
        slot.counts.n_replayed, slot.counts.overlap = 1000, 1000 * share
    # chance is 2 of 8; the floor is twice that
    assert "layers.1.mlp.gate" in (routes.misrouted(routes.take_counts()) or "")


def test_step_whose_routes_are_mostly_unknown_is_no_replay(moe: Path) -> None:
    routes = Routes.install(load_model(str(moe), ActorSettings(), FsdpSettings()).lm)
    for num_known, is_refused in ((499, True), (500, False)):
        for slot in routes.slots:
            slot.counts = RouteCounts(n_tokens=1000, n_replayed=num_known, overlap=num_known)
        assert (f"routes of {num_known / 1000:.2f} of the tokens" in (routes.misrouted(routes.take_counts()) or "")) == is_refused


@pytest.mark.parametrize("num_rows", [2, 3])
def test_layers_without_experts_are_left_out_of_either_layout(tmp_path: Path, num_rows: int) -> None:
    """Layer 0 is dense. An engine tells 3 rows, one for each layer, or 2, one for each layer with experts; any other number is refused."""
    rows = make_rows(1)
    scorer = scorer_of(make_moe(tmp_path / "moe", num_layers=3, dense_layers=[0]))
    assert scorer.routes is not None and [slot.layer for slot in scorer.routes.slots] == [1, 2]
    chosen = np.random.default_rng(0).permuted(np.tile(np.arange(NUM_EXPERTS), (len(rows[0].token_ids), 2, 1)), axis=-1)[..., :TOP_K]
    chosen = chosen.astype(np.int16)
    told = chosen if num_rows == 2 else np.concatenate([np.zeros_like(chosen[:, :1]), chosen], axis=1)
    scorer.routes.check(told, "segment a")
    with pytest.raises(LineageError, match="routes of 4 layers"):
        scorer.routes.check(np.concatenate([told, told], axis=1)[:, :4], "segment a")
    packed = pack([rows[0].token_ids], [rows[0].is_sampled], routes=[told])
    scorer(packed)
    assert [slot.target_LK.tolist() for slot in scorer.routes.slots if slot.target_LK is not None] == [
        chosen[:, 0].tolist(), chosen[:, 1].tolist()
    ]  # fmt: skip


def test_padding_and_dummies_count_as_no_token(moe: Path) -> None:
    scorer = scorer_of(moe)
    assert scorer.routes is not None
    scorer(dummy())
    assert [count.n_tokens for count in scorer.routes.take_counts()] == [0, 0]
    ids = np.array([0, 0, 5], np.int32)  # id 0 is a token like any other
    scorer(pack([ids], [np.array([False, True, True])]))
    assert [count.n_tokens for count in scorer.routes.take_counts()] == [3, 3]


def test_frozen_router_stays(moe: Path) -> None:
    rows = make_rows(4)
    rank = make_rank(make_config(moe, actor={"freeze_moe_router": True}), rows)
    before = {n: t.clone() for n, t in rank.policy.full_tensors().items()}
    rank.train(make_plan(rows))
    after = rank.policy.full_tensors()
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert moved and not any(n.endswith("mlp.gate.weight") for n in moved)


def test_dense_model_has_no_router_to_replay_or_freeze(model: Path) -> None:
    with pytest.raises(SettingError, match="no router that Molt knows"):
        Routes.install(load_model(str(model), ActorSettings(), FsdpSettings()).lm)
    with pytest.raises(SettingError, match="has no router"):
        load_model(str(model), ActorSettings(freeze_moe_router=True), FsdpSettings())


def test_router_stays_in_float32_while_layers_compute_in_bfloat16(moe: Path) -> None:
    rows, seen = make_rows(2), {}
    for dtype in ("auto", "float32"):
        rank = make_rank(make_config(moe, actor={"dtype": "bfloat16", "moe_router_dtype": dtype}), rows)
        found: list[torch.dtype] = []
        for name, module in rank.policy.scorer.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda _module, _inputs, output, found=found: found.append(output[0].dtype))
        result = rank.train(make_plan(rows))
        assert result.refused is None
        seen[dtype] = set(found)
    assert seen == {"auto": {torch.bfloat16}, "float32": {torch.float32}}
