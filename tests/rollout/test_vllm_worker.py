"""What Molt adds to vLLM's workers and outputs, as far as it needs no vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from molt.errors import LineageError
from molt.rollout.vllm_calls import fit_routes
from molt.rollout.vllm_counts import EngineCounts
from molt.rollout.vllm_worker import expand_to_tokens


def test_values_of_requests_are_expanded_over_their_tokens() -> None:
    values, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6], dtype=torch.int32)
    assert expand_to_tokens(values, ends, 6).tolist() == [0.5, 0.5, 0.0, 2.0, 2.0, 2.0]
    # Greedy requests divide by 1.
    assert expand_to_tokens(values, ends, 6, replace_from=0, replace_to=1).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_request_without_drafts_has_no_token() -> None:
    assert expand_to_tokens(torch.tensor([3, 4]), torch.tensor([0, 2]), 2).tolist() == [4, 4]


def test_there_is_no_acceptance_without_drafts() -> None:
    assert EngineCounts().acceptance is None
    assert EngineCounts(n_drafted=8, n_accepted=6).acceptance == 0.75


def test_routes_are_fitted_to_the_tokens_asked_for_and_whole_prefixes_are_refused() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(6, 1, 2)
    assert fit_routes(rows, 5).tolist() == rows[:5].tolist()
    assert fit_routes(rows, 7)[6].tolist() == [[-1, -1]]
    # 256 experts in a byte leave no room for a row that is missing: it is -1, apart from the expert 255.
    assert fit_routes(np.array([[[0, 255]]], np.uint8), 2).tolist() == [[[0, 255]], [[-1, -1]]]
    with pytest.raises(LineageError, match="of 60 positions where 5 were asked for"):
        fit_routes(np.zeros((60, 1, 2), np.uint8), 5)
