"""Rows that see each other are found by asking the model, whatever its layers are called; so are scores that are drawn at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from molt.config import ActorSettings, FsdpSettings
from molt.errors import SettingError
from molt.learn import attention
from molt.learn.apart import LENGTH, refuse_leaks, rows_apart
from molt.learn.model import load_model
from molt.learn.packing import Packed
from tests.learn.tiny import VOCAB, make_model, make_moe


def scores_of(scorer: Any) -> Any:
    return torch.no_grad()(lambda packed: scorer(packed)[0])


def whole(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **further: Any) -> tuple[torch.Tensor, None]:
    """One causal mask over the whole batch."""
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=further.get("scaling"))
    return output.transpose(1, 2), None


@pytest.mark.parametrize("attn", ["sdpa", "eager", "flex"])
@pytest.mark.parametrize("make", [make_model, make_moe])
def test_rows_of_known_models_are_apart(make: Any, attn: Any, tmp_path: Path) -> None:
    scorer = load_model(str(make(tmp_path)), ActorSettings(implementation="hf"), FsdpSettings(attn_implementation=attn))
    found = rows_apart(scores_of(scorer), num_entries=VOCAB)
    assert found is not None and found.noise == 0.0 and found.leak < 1e-5
    refuse_leaks(scores_of(scorer), scorer.lm.config, path=str(tmp_path), attention=attn)


def test_attention_over_the_whole_batch_is_refused(tmp_path: Path) -> None:
    from transformers import AttentionInterface

    scorer = load_model(str(make_model(tmp_path)), ActorSettings(implementation="hf"), FsdpSettings())
    AttentionInterface.register(attention.NAME, whole)
    try:
        with pytest.raises(SettingError, match=r"rows see each other; take another model or attention, or set fsdp\.packing_check=false"):
            refuse_leaks(scores_of(scorer), scorer.lm.config, path=str(tmp_path), attention="sdpa")
    finally:
        attention.register()


def scores_with(reach: int) -> Any:
    """A model whose score of a token is that of the ids up to `reach` places before it, whatever row they are in, and that of itself."""

    def score(packed: Packed) -> torch.Tensor:
        ids = packed.input_ids[0].float()
        seen = sum((F.pad(ids, (place, 0))[: len(ids)] for place in range(reach + 1)), torch.zeros_like(ids))
        return seen[packed.index_N]

    return score


@pytest.mark.parametrize(("reach", "is_apart"), [(0, True), (1, False), (3, False), (LENGTH, False)])
def test_a_short_reach_over_the_border_shows(reach: int, is_apart: bool) -> None:
    found = rows_apart(scores_with(reach), num_entries=VOCAB)
    assert found is not None and (found.leak <= 0.1) == is_apart


def test_a_model_that_draws_at_random_is_refused(tmp_path: Path) -> None:
    scorer = load_model(str(make_model(tmp_path)), ActorSettings(implementation="hf"), FsdpSettings())
    plain = scores_of(scorer)
    with pytest.raises(SettingError, match=r"the same row scored twice differs by .*, which no engine does"):
        refuse_leaks(lambda packed: F.dropout(plain(packed), 0.1), scorer.lm.config, path=str(tmp_path), attention="sdpa")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_model_without_scores_of_its_own_tells_nothing(value: float, tmp_path: Path) -> None:
    def score(packed: Packed) -> torch.Tensor:
        return torch.full((len(packed.index_N),), value)

    assert rows_apart(score, num_entries=VOCAB) is None


def test_ids_that_stand_for_pictures_are_left_out() -> None:
    seen: list[int] = []

    def score(packed: Packed) -> torch.Tensor:
        seen.extend(packed.input_ids[0].tolist())
        return packed.target_N.float()

    rows_apart(score, num_entries=5, without=frozenset({1, 3}))
    assert set(seen) == {0, 2, 4}
