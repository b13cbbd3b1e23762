"""Packed rows: scored as if alone, shifted inside themselves, masked by lineage and never by value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from molt.config import ActorSettings, FsdpSettings
from molt.errors import LineageError, SettingError
from molt.learn.model import load_model
from molt.learn.packing import pack
from tests.learn.tiny import VOCAB

LENGTHS = (5, 7, 4, 9)


def rows() -> tuple[list[np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]
    return ids, [np.arange(n) >= 2 for n in LENGTHS]


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex"])
def test_packed_rows_score_as_alone_and_as_the_plain_model(model: Path, attention: str) -> None:
    from transformers import AutoModelForCausalLM

    ids, masks = rows()
    scorer = load_model(str(model), ActorSettings(), FsdpSettings(attn_implementation=attention))
    packed, entropy = scorer(pack(ids, masks), True)
    alone = torch.cat([scorer(pack([i], [m]), True)[0] for i, m in zip(ids, masks, strict=True)])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected, expected_entropy = [], []
    for i, m in zip(ids, masks, strict=True):
        logp = torch.log_softmax(plain(torch.tensor(i[None].astype(np.int64))).logits[0].double(), -1)
        places = np.flatnonzero(m)
        expected.append(logp[places - 1, i[places]])  # the output before a token predicts it
        expected_entropy.append(-(logp.exp() * logp).sum(-1)[places - 1])
    assert torch.allclose(packed, alone, atol=1e-6)
    assert torch.allclose(packed.double(), torch.cat(expected), atol=1e-5)
    assert torch.allclose(entropy.double(), torch.cat(expected_entropy), atol=1e-5)


def test_changing_one_row_changes_no_other_row_at_all(model: Path) -> None:
    ids, masks = rows()
    scorer = load_model(str(model), ActorSettings(), FsdpSettings())
    before = scorer(pack(ids, masks))[0].detach()
    ids[1] = ids[1].copy()
    ids[1][3] = (ids[1][3] + 1) % VOCAB
    after = scorer(pack(ids, masks))[0].detach()
    row = pack(ids, masks).row_N
    assert float((before - after)[row != 1].abs().max()) == 0.0
    assert float((before - after)[row == 1].abs().max()) > 0.0


def test_positions_restart_and_targets_stay_inside_their_row() -> None:
    # rows of 3 and 4 ids; the last token of the first and the last two of the second are sampled
    packed = pack([np.array([10, 11, 12]), np.array([0, 21, 0, 23])], [np.array([0, 0, 1], bool), np.array([0, 0, 1, 1], bool)])
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.index_N.tolist() == [1, 4, 5]
    assert packed.target_N.tolist() == [12, 0, 23]  # an interior id 0 is a token like any other
    assert packed.row_N.tolist() == [0, 1, 1]


def test_sampled_first_token_is_refused() -> None:
    with pytest.raises(LineageError, match="row 0"):
        pack([np.array([1, 2])], [np.array([True, True])])


def save(config: object, folder: Path) -> Path:
    """A folder with a config and random weights of it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def test_layers_with_a_state_are_refused_since_it_would_go_from_row_to_row(tmp_path: Path) -> None:
    from transformers import Lfm2Config

    # the short convolutions of this model look three tokens back, whichever row they are of
    config = Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    with pytest.raises(SettingError, match=r"its layers \(conv\) look beyond the tokens of their own row"):
        load_model(str(save(config, tmp_path / "model")), ActorSettings(), FsdpSettings())


def test_capped_scores_are_refused_by_attentions_that_do_not_cap_them(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    folder = save(Gemma2Config(**SMALL, query_pre_attn_scalar=8, sliding_window=4), tmp_path / "model")
    ids, masks = rows()
    ids = [row % SMALL["vocab_size"] for row in ids]
    for kind in ("sdpa", "flex"):
        scorer = load_model(str(folder), ActorSettings(), FsdpSettings(attn_implementation=kind))
        with torch.no_grad(), pytest.raises(SettingError, match="the layers of this model give it softcap"):
            scorer(pack(ids, masks))
    with pytest.raises(SettingError, match=r"attn_implementation=eager, .* has layers that see a window"):
        load_model(str(folder), ActorSettings(), FsdpSettings(attn_implementation="eager"))


@torch.no_grad()
def test_layers_that_see_a_window_score_packed_rows_as_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    folder = save(
        Gemma3TextConfig(**SMALL, query_pre_attn_scalar=8, sliding_window=3, layer_types=["sliding_attention"] * 2), tmp_path / "m"
    )
    ids, masks = rows()
    ids = [row % SMALL["vocab_size"] for row in ids]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for row, mask in zip(ids, masks, strict=True):
        places = np.flatnonzero(mask)
        expected.append(torch.log_softmax(plain(torch.tensor(row[None].astype(np.int64))).logits[0], -1)[places - 1, row[places]])
    for kind in ("sdpa", "flex"):
        scorer = load_model(str(folder), ActorSettings(), FsdpSettings(attn_implementation=kind))
        assert torch.allclose(scorer(pack(ids, masks))[0], torch.cat(expected), atol=1e-5)
