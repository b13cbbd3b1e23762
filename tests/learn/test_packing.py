"""Packed rows: scored as if alone, shifted inside themselves, masked by lineage and never by value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from molt.config import ActorSettings, FsdpSettings
from molt.errors import LineageError
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
