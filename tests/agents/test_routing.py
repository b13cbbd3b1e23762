"""Routes of a segment from its calls: absolute positions, each token once, the boundary token from the call that computes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from molt.agents.conversation import CallPrompt
from molt.agents.policy import join_generations
from molt.agents.routing import routing_payload, segment_routing
from molt.agents.segments import SegmentBuilder, SegmentDraft
from molt.errors import LineageError
from molt.log.rows import TokenSource
from tests.agents.scripted import generation


def rows(*experts: int) -> np.ndarray:
    """(len, 1, 2) int16: expert e and e + 1 for each position; -1 is unknown."""
    return np.array([[[e, e + 1 if e >= 0 else -1]] for e in experts], np.int16)


def asked(prompt: list[int]) -> CallPrompt:
    return CallPrompt(token_ids=np.array(prompt, np.int32), sources=((TokenSource.USER, len(prompt)),), opened_by="start")


def draft_of(*calls: tuple[list[int], list[int], np.ndarray | None], first: tuple[int, ...] = ()) -> SegmentDraft:
    builder = SegmentBuilder()
    for turn, (prompt, sampled, routes) in enumerate(calls):
        start = first[turn] if first else 0
        builder.add(asked(prompt), replace(generation(sampled), routed_experts=routes, routes_from=start), turn)
    (draft,) = builder.segments
    return draft


def test_each_turn_is_asked_for_the_rows_that_no_earlier_one_told() -> None:
    builder = SegmentBuilder()
    assert builder.num_routed(asked([1, 2, 3])) == 0
    builder.add(asked([1, 2, 3]), replace(generation([4, 5]), routed_experts=rows(10, 20, 30, 40)), 0)
    # 5 tokens, 4 of them routed: the next turn begins with the last sampled one.
    assert builder.num_routed(asked([1, 2, 3, 4, 5, 6, 7])) == 4
    assert builder.num_routed(asked([1, 9, 3])) == 0, "another prefix is another segment"
    builder.add(asked([1, 2, 3, 4, 5, 6, 7]), replace(generation([8]), routed_experts=rows(50, 60, 70), routes_from=4), 1)
    routes = segment_routing(builder.segments[0])
    assert routes is not None and routes[:, 0, 0].tolist() == [10, 20, 30, 40, 50, 60, 70]


def test_a_row_that_is_unknown_is_asked_for_again() -> None:
    builder = SegmentBuilder()
    builder.add(asked([1, 2, 3]), replace(generation([4]), routed_experts=rows(10, -1, 30)), 0)
    assert builder.num_routed(asked([1, 2, 3, 4, 5])) == 1
    builder.add(asked([1, 2, 3, 4, 5]), replace(generation([6]), routed_experts=rows(21, 31, 40, 50), routes_from=1), 1)
    routes = segment_routing(builder.segments[0])
    assert routes is not None and routes[:, 0, 0].tolist() == [10, 21, 30, 40, 50]


def test_parts_of_a_call_that_was_cut_tell_their_rows_once() -> None:
    # Prompt of 3: the first part samples 2 tokens (rows 0 to 3), the second begins with the token at position 4.
    first = replace(generation([4, 5]), routed_experts=rows(10, 20, 30, 40))
    none = generation([])
    second = replace(generation([6]), routed_experts=rows(50), routes_from=4)
    whole = join_generations([first, none, second])
    assert whole.routes_from == 0 and whole.routed_experts is not None
    assert whole.routed_experts[:, 0, 0].tolist() == [10, 20, 30, 40, 50]
    assert join_generations([none, generation([7])]).routed_experts is None


def test_the_boundary_token_comes_from_the_next_turn_and_only_the_last_one_stays_unknown() -> None:
    # Turn 1: 3 prompt + 2 sampled give 4 rows. Turn 2: 2 more observed + 1 sampled give 7 rows for 8 tokens.
    draft = draft_of(([1, 2, 3], [4, 5], rows(10, 20, 30, 40)), ([1, 2, 3, 4, 5, 6, 7], [8], rows(11, 21, 31, 41, 50, 60, 70)))
    routes = segment_routing(draft)
    assert routes is not None and routes.dtype == np.int16
    assert routes[:, 0, 0].tolist() == [10, 20, 30, 40, 50, 60, 70], "the first four keep what the first turn said"
    assert len(routes) == len(draft.token_ids) - 1


def test_rows_that_no_call_knew_stay_unknown() -> None:
    draft = draft_of(([1, 2, 3], [4, 5], rows(10, -1, 30, 40)))
    routes = segment_routing(draft)
    assert routes is not None and routes[:, 0].tolist() == [[10, 11], [-1, -1], [30, 31], [40, 41]]


def test_a_call_without_routes_leaves_its_tokens_unknown() -> None:
    draft = draft_of(([1, 2], [3, 4], rows(10, 20, 30)), ([1, 2, 3, 4], [5], None))
    routes = segment_routing(draft)
    assert routes is not None and routes[:, 0, 0].tolist() == [10, 20, 30, -1]


def test_a_dense_model_has_no_payload() -> None:
    draft = draft_of(([1, 2], [3], None))
    assert segment_routing(draft) is None and routing_payload(draft) is None


@pytest.mark.parametrize(
    ("experts", "num_bytes"), [((254, 511), 2), ((-1, 127), 2), ((-1, 126), 1), ((0, 1), 1)], ids=["many", "128", "127", "few"]
)
def test_a_payload_takes_a_byte_an_expert_where_all_fit(experts: tuple[int, int], num_bytes: int) -> None:
    draft = draft_of(([1, 2], [3], rows(*experts)))
    routes, payload = segment_routing(draft), routing_payload(draft)
    assert routes is not None and payload is not None and payload.kind == "routing"
    assert payload.size_bytes == num_bytes * routes.size
    assert payload.to_array().tolist() == routes.tolist()


@pytest.mark.parametrize("bad", [rows(1, 2)[:1], np.zeros((9, 1, 2), np.int16), np.zeros((3, 2), np.int16)])
def test_routes_of_another_length_or_shape_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(LineageError, match="routed experts of shape"):
        segment_routing(draft_of(([1, 2], [3, 4], bad)))
