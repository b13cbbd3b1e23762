"""Segments: continues, opens or refused; every token is exactly one of prompt, sampled or observation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.agents.conversation import CallPrompt, Conversation
from molt.agents.render import ChatRenderer
from molt.agents.segments import SegmentBuilder, first_difference
from molt.errors import LineageError
from molt.log.rows import Span, TokenSource
from molt.rollout.engine import FinishReason
from tests.agents.scripted import generation


def call(ids: list[int], opened_by: str = "start") -> CallPrompt:
    return CallPrompt(token_ids=np.array(ids, np.int32), sources=((TokenSource.USER, len(ids)),), opened_by=opened_by)


def test_three_turns_of_one_segment_have_exactly_their_sampled_tokens_trainable() -> None:
    builder = SegmentBuilder()
    builder.add(call([1, 2]), generation([5, 6]), 0)
    builder.add(call([1, 2, 5, 6, 9]), generation([7, 8, 7]), 1)
    builder.add(call([1, 2, 5, 6, 9, 7, 8, 7, 9]), generation([4, 4, 4, 4]), 2)
    (segment,) = builder.segments
    assert segment.token_ids.tolist() == [1, 2, 5, 6, 9, 7, 8, 7, 9, 4, 4, 4, 4]
    # 2 + 3 + 4 sampled tokens
    assert sum(span.len for span in segment.spans if span.trainable) == 9 == builder.num_sampled
    assert np.isnan(segment.logprobs).tolist() == [True] * 2 + [False] * 2 + [True] + [False] * 3 + [True] + [False] * 4


def test_rewritten_prefix_opens_a_segment_at_the_first_difference() -> None:
    builder = SegmentBuilder()
    builder.add(call([1, 2, 3]), generation([5, 6]), 0)
    builder.add(call([1, 2, 4, 5, 6], "compaction"), generation([7]), 1)
    assert [segment.opened_by for segment in builder.segments] == ["start", "compaction"]
    assert builder.segments[1].first_difference == 2
    assert builder.segments[1].token_ids.tolist() == [1, 2, 4, 5, 6, 7]
    # Ids 5 and 6 were sampled in the first segment; here they are history.
    assert sum(span.len for span in builder.segments[1].spans if span.trainable) == 1


def test_versions_that_change_inside_a_call_split_its_span() -> None:
    sampled = replace(generation([5, 6, 7]), policy_versions=np.array([3, 3, 4], np.int32), kv_versions=np.array([3, 3, 3], np.int32))
    builder = SegmentBuilder()
    builder.add(call([1]), sampled, 0)
    assert builder.segments[0].spans[1:] == [
        Span(len=2, source=TokenSource.POLICY, trainable=True, policy_version=3, kv_version=3, turn=0),
        Span(len=1, source=TokenSource.POLICY, trainable=True, policy_version=4, kv_version=3, turn=0),
    ]


def test_call_that_samples_nothing_leaves_no_token_and_is_no_parent() -> None:
    builder = SegmentBuilder()
    builder.add(call([1, 2]), generation([]), 0)
    assert builder.segments == [] and builder.num_empty == 1
    builder.add(call([1, 2]), generation([5, 6, 7]), 1)
    assert builder.segments[0].token_ids.tolist() == [1, 2, 5, 6, 7]


def test_true_zero_logprob_is_kept() -> None:
    builder = SegmentBuilder()
    builder.add(call([1]), replace(generation([5, 6]), logprobs=np.array([0.0, -0.0], np.float32)), 0)
    assert builder.segments[0].logprobs[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "3 ids and 2 logprobs"),
        ({"policy_versions": np.zeros(4, np.int32)}, "3 ids and 4 policy_versions"),
        ({"kv_versions": np.zeros(0, np.int32)}, "3 ids and 0 kv_versions"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "token 1 of 3 is nan"),
        ({"logprobs": np.array([-1, -1, -np.inf], np.float32)}, "token 2 of 3 is -inf"),
        ({"logprobs": np.array([0.5, -1, -1], np.float32)}, "token 0 of 3 is 0.5"),
        ({"token_ids": np.array([5, -1, 6], np.int32)}, "negative id"),
        ({"policy_versions": np.array([0, -1, 0], np.int32)}, "negative policy"),
        ({"token_ids": np.array([5, 9, 6], np.int32)}, "past the stop id at token 1 of 3"),
        ({"token_ids": np.array([5, 6, 7], np.int32)}, "last id is no stop id"),
    ],
)
def test_answer_without_full_lineage_is_refused(changes: dict, reason: str) -> None:
    builder = SegmentBuilder(stop_token_ids=(9,))
    with pytest.raises(LineageError, match=reason):
        builder.add(call([1]), replace(generation([5, 6, 9]), **changes), 0)
    assert builder.segments == []


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(LineageError, match="no ids"):
        SegmentBuilder().add(call([]), generation([5]), 0)


def test_first_difference_of_a_prefix_is_its_length() -> None:
    assert first_difference(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert first_difference(np.array([1, 2, 3]), np.array([1, 9, 3])) == 1


words = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["<|end|>", "a <|assistant|>", "<calc>1+1</calc>"])
# Any id but 1, which ends a turn: special tokens too.
said = st.lists(st.integers(0, 263).filter(lambda token_id: token_id != 1), max_size=6)
observed_messages = st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), words), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(said, st.booleans(), observed_messages, st.booleans()), min_size=1, max_size=5))
def test_segments_are_the_engines_own_ids_and_masks_never_cover_a_prompt(renderer: ChatRenderer, turns) -> None:
    """Law: for any chat, each segment is the input and output of its last call, and its trainable tokens are those that were sampled."""
    end = renderer.stop_token_ids[0]
    conversation, builder = Conversation(renderer), SegmentBuilder(stop_token_ids=renderer.stop_token_ids)
    messages = [{"role": "user", "content": "start"}]
    calls: list[tuple[list[int], list[int]]] = []
    for number, (ids, stops, observed, forgets) in enumerate(turns):
        sampled = [*ids, end] if stops or not ids else ids
        answer = generation(sampled, version=number, finish_reason=FinishReason.STOP if sampled[-1] == end else FinishReason.LENGTH)
        prompt = conversation.prompt(messages)
        builder.add(prompt, answer, number)
        calls.append((prompt.token_ids.tolist(), sampled))
        turn = conversation.add(messages, prompt, answer.token_ids)
        messages = [*messages, {"role": "assistant", "content": turn.text}, *({"role": role, "content": text} for role, text in observed)]
        if forgets:
            messages = [{"role": "user", "content": "summary"}, messages[-1]] if messages[-1]["role"] != "assistant" else messages
    taken = 0
    for segment in builder.segments:
        num_calls = len({span.turn for span in segment.spans if span.source is TokenSource.POLICY})
        prompt_ids, sampled = calls[taken + num_calls - 1]
        assert segment.token_ids.tolist() == prompt_ids + sampled
        trainable = np.repeat([span.trainable for span in segment.spans], [span.len for span in segment.spans])
        expected = np.zeros(len(segment.token_ids), bool)
        for prompt_ids, sampled in calls[taken : taken + num_calls]:
            assert segment.token_ids[: len(prompt_ids)].tolist() == prompt_ids
            expected[len(prompt_ids) : len(prompt_ids) + len(sampled)] = True
        assert trainable.tolist() == expected.tolist()
        assert (~np.isnan(segment.logprobs)).tolist() == expected.tolist()
        assert sum(span.len for span in segment.spans) == len(segment.token_ids)
        taken += num_calls
    assert taken == len(turns)
    assert builder.num_sampled == sum(len(sampled) for _, sampled in calls)
