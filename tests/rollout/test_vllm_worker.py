"""What Molt adds to a vLLM worker, as far as it needs no vLLM."""

from __future__ import annotations

import torch

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
