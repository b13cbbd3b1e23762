"""The sampler: log-probs of the distribution that is sampled from, and one choice per row from its own number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.rollout.sampler import SamplingRows, processed_logprobs, sample_ids, uniforms


def rows(num: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, uniform: float = 0.5) -> SamplingRows:
    return SamplingRows(
        temperature_B=torch.full((num,), temperature),
        top_p_B=torch.full((num,), top_p),
        top_k_B=torch.full((num,), top_k),
        uniform_B=torch.full((num,), uniform, dtype=torch.float64),
        is_masked=top_p < 1.0 or top_k > 0,
    )


def test_temperature_divides_logits_before_the_softmax() -> None:
    # logits [2, 0], T = 2 -> softmax of [1, 0]: ln p0 = -ln(1 + e^-1) = -0.3133; a log-prob divided by T would be -0.0635.
    logprobs = processed_logprobs(torch.tensor([[2.0, 0.0]]), rows(1, temperature=2.0))
    assert logprobs[0, 0].item() == pytest.approx(-0.31326, abs=1e-5)


def test_top_p_renormalises_over_the_smallest_set_that_reaches_it() -> None:
    # p = [.5, .3, .2], top_p = .8 keeps the first two: .5 / .8 = .625.
    logprobs = processed_logprobs(torch.tensor([[0.5, 0.3, 0.2]]).log(), rows(1, top_p=0.8))
    assert logprobs.exp()[0].tolist() == pytest.approx([0.625, 0.375, 0.0])


def test_top_k_keeps_the_k_most_likely() -> None:
    # p = [.1, .4, .2, .3], k = 2 keeps .4 and .3: 4/7 and 3/7.
    logprobs = processed_logprobs(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log(), rows(1, top_k=2))
    assert logprobs.exp()[0].tolist() == pytest.approx([0.0, 4 / 7, 0.0, 3 / 7])


def test_bf16_logits_are_widened_before_the_division() -> None:
    logits = torch.tensor([[20.0, 24.75, 27.5, 30.25]], dtype=torch.bfloat16)
    expected = torch.log_softmax(logits.double() / 0.7, -1)
    assert (processed_logprobs(logits, rows(1, temperature=0.7)).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.24, 1), (0.26, 3), (0.999999, 3)])
def test_the_number_picks_by_the_distribution_function_and_never_an_impossible_id(uniform: float, expected: int) -> None:
    # p = [0, .25, 0, .75, 0]
    logits = torch.tensor([[-math.inf, math.log(0.25), -math.inf, math.log(0.75), -math.inf]])
    ids, logprobs = sample_ids(logits, rows(1, uniform=uniform))
    assert ids.item() == expected
    assert logprobs.item() == pytest.approx(math.log(0.25 if expected == 1 else 0.75))


def test_greedy_takes_the_largest_whatever_the_number() -> None:
    ids, logprobs = sample_ids(torch.tensor([[0.0, 3.0, 1.0]]), rows(1, temperature=0.0, uniform=0.99))
    assert ids.item() == 1
    assert logprobs.item() == pytest.approx(3.0 - math.log(1 + math.e**3 + math.e))


def test_frequencies_are_the_probabilities() -> None:
    probs = torch.tensor([0.05, 0.5, 0.25, 0.2])
    num = 20_000
    drawn = rows(num)
    drawn = SamplingRows(
        temperature_B=drawn.temperature_B,
        top_p_B=drawn.top_p_B,
        top_k_B=drawn.top_k_B,
        uniform_B=torch.from_numpy(uniforms(3, num)),
        is_masked=False,
    )
    ids, _ = sample_ids(probs.log().expand(num, -1), drawn)
    shares = torch.bincount(ids, minlength=4) / num
    assert (shares - probs).abs().max() < 4 * math.sqrt(0.25 / num)  # four standard deviations of a share


@given(st.integers(0, 2**62 - 1), st.integers(1, 50), st.integers(1, 50))
def test_a_longer_request_begins_with_the_numbers_of_a_shorter_one(seed: int, first: int, second: int) -> None:
    short, long = sorted((first, second))
    assert np.array_equal(uniforms(seed, short), uniforms(seed, long)[:short])
