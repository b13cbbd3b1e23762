"""What the engine is asked, call by call: ids as sampled, glue of the template once, and new segments where history was rewritten."""

from __future__ import annotations

import json

import numpy as np
import pytest

from molt.agents.conversation import Conversation
from molt.agents.render import PLAIN_TEMPLATE, ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.data.messages import TURN_KEY
from molt.errors import AgentError
from molt.log.rows import TokenSource
from tests.agents.tokenizers_for_tests import byte_tokenizer

USER = {"role": "user", "content": "Hi"}
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


class Spy:
    """A tokenizer that keeps every text that it was asked to encode."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.encoded: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def encode_with_offsets(self, text: str):
        self.encoded.append(text)
        return self._inner.encode_with_offsets(text)


def chatml(**options) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(CHATML, eos="<|im_end|>", **options))


def two_calls(renderer: ChatRenderer, sampled: np.ndarray, observation: dict) -> tuple[np.ndarray, np.ndarray, str]:
    """First prompt, second prompt, and the text that the agent saw in between."""
    conversation = Conversation(renderer)
    first = conversation.prompt([USER])
    turn = conversation.add([USER], first, sampled)
    second = conversation.prompt([USER, {"role": "assistant", "content": turn.text}, observation])
    return first.token_ids, second.token_ids, turn.text


def test_ids_that_join_to_a_merged_token_stay_two_ids() -> None:
    # The vocabulary has "ab" as one token; the engine sampled "a", "b". Encoding the text again would give one id.
    renderer = chatml(merges=(("a", "b"),))
    tokenizer = renderer.tokenizer
    a, b, end = (tokenizer.id_of(text) for text in ("a", "b", "<|im_end|>"))
    assert tokenizer.encode("ab").tolist() == [tokenizer.id_of("ab")]
    first, second, text = two_calls(renderer, np.array([a, b, end], np.int32), {"role": "tool", "content": "42"})
    assert text == "ab"
    assert second[len(first) : len(first) + 3].tolist() == [a, b, end]


def test_text_of_the_model_is_never_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = chatml()
    spy = Spy(renderer.tokenizer)
    renderer.tokenizer = spy  # type: ignore[assignment]
    renderer.template.tokenizer = spy  # type: ignore[assignment]
    sampled = spy._inner.encode("SECRET<|im_end|>")
    two_calls(renderer, sampled, {"role": "user", "content": "again"})
    assert spy.encoded
    assert not any("SECRET" in text for text in spy.encoded)


def test_glue_after_the_stop_id_is_that_of_a_full_render() -> None:
    renderer = chatml()
    encode = renderer.tokenizer.encode
    first, second, _ = two_calls(renderer, encode("one<|im_end|>"), {"role": "user", "content": "two"})
    # The stop id was sampled; the line break after it was not, and comes from the template.
    glue = second[len(first) + len(encode("one<|im_end|>")) :]
    assert glue.tolist() == encode("\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n").tolist()


def test_stop_id_stands_once_in_history_and_not_in_the_text() -> None:
    renderer = chatml()
    _, second, text = two_calls(renderer, renderer.tokenizer.encode("one<|im_end|>"), {"role": "user", "content": "two"})
    assert text == "one"
    # user, assistant and user turn end once each.
    assert renderer.tokenizer.decode(second).count("<|im_end|>") == 3


def test_cut_turn_is_closed_by_the_template() -> None:
    renderer = chatml()
    _, second, text = two_calls(renderer, renderer.tokenizer.encode("on"), {"role": "user", "content": "two"})
    assert text == "on"
    assert "assistant\non<|im_end|>\n<|im_start|>user" in renderer.tokenizer.decode(second)


def test_second_end_id_stands_in_for_the_marker() -> None:
    renderer = ChatRenderer(byte_tokenizer(CHATML, eos="<|endoftext|>"))
    assert len(renderer.stop_token_ids) == 2
    for end in ("<|im_end|>", "<|endoftext|>"):
        sampled = renderer.tokenizer.encode("one" + end)
        first, second, text = two_calls(renderer, sampled, {"role": "user", "content": "two"})
        assert text == "one"
        assert second[len(first) : len(first) + len(sampled)].tolist() == sampled.tolist()
        assert f"one{end}\n<|im_start|>user" in renderer.tokenizer.decode(second)


def test_special_token_inside_an_answer_is_kept() -> None:
    renderer = chatml()
    sampled = renderer.tokenizer.encode("a<bos>b<|im_end|>")
    first, second, text = two_calls(renderer, sampled, {"role": "tool", "content": "42"})
    assert len(sampled) == 4
    assert text == "a<bos>b"
    assert second[len(first) : len(first) + 4].tolist() == sampled.tolist()


def test_half_a_character_is_a_view_problem_only() -> None:
    renderer = chatml()
    # An emoji is four bytes, here four ids; the answer ends after two of them.
    half = renderer.tokenizer.encode("😀")[:2]
    assert len(renderer.tokenizer.encode("😀")) == 4
    first, second, text = two_calls(renderer, half, {"role": "user", "content": "go on"})
    assert "\ufffd" in text
    assert second[len(first) : len(first) + 2].tolist() == half.tolist()


def test_arguments_written_differently_by_the_client_do_not_reach_the_history() -> None:
    renderer = chatml()
    written = '<tool_call>{"name":"f","arguments":{"a":1,"b":[2,3]}}</tool_call>'
    sampled = renderer.tokenizer.encode(written + "<|im_end|>")
    first, second, text = two_calls(renderer, sampled, {"role": "tool", "content": "42"})
    assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] == {"b": [2, 3], "a": 1}
    assert second[: len(first) + len(sampled)].tolist() == [*first.tolist(), *sampled.tolist()]


def test_edited_assistant_text_opens_a_segment_by_compaction() -> None:
    renderer = chatml()
    conversation = Conversation(renderer)
    first = conversation.prompt([USER])
    conversation.add([USER], first, renderer.tokenizer.encode("one<|im_end|>"))
    second = conversation.prompt([USER, {"role": "assistant", "content": "uno"}, USER])
    assert second.opened_by == "compaction"
    assert renderer.tokenizer.decode(second.token_ids).count("uno") == 1
    assert TokenSource.POLICY not in {source for source, _ in second.sources}


def test_summary_in_place_of_old_turns_keeps_the_ids_of_the_turns_that_stay() -> None:
    renderer = chatml(merges=(("a", "b"),))
    tokenizer = renderer.tokenizer
    a, b, end = (tokenizer.id_of(text) for text in ("a", "b", "<|im_end|>"))
    conversation = Conversation(renderer)
    history = [USER]
    for sampled in (tokenizer.encode("first<|im_end|>"), np.array([a, b, end], np.int32)):
        prompt = conversation.prompt(history)
        turn = conversation.add(history, prompt, sampled)
        history = [*history, {"role": "assistant", "content": turn.text}, {"role": "user", "content": "more"}]
    compacted = conversation.prompt([{"role": "user", "content": "summary"}, *history[3:]])
    assert compacted.opened_by == "compaction"
    # "ab" is in the new history as the two ids that were sampled.
    assert [a, b, end] in [compacted.token_ids[i : i + 3].tolist() for i in range(len(compacted.token_ids) - 2)]
    assert (TokenSource.HISTORY, 3) in compacted.sources


def test_same_messages_again_are_a_fork() -> None:
    renderer = chatml()
    conversation = Conversation(renderer)
    first = conversation.prompt([USER])
    conversation.add([USER], first, renderer.tokenizer.encode("one<|im_end|>"))
    assert conversation.prompt([USER]).opened_by == "fork"


@pytest.mark.parametrize("content", ["Be brief.", "Hi"])
def test_message_that_the_template_leaves_out_is_an_error_even_if_its_words_stand_elsewhere(content: str) -> None:
    # system messages are shown at the head of a chat alone
    head_only = CHATML.replace("-%}{{- '<|im_start|>'", "-%}{%- if message['role'] != 'system' or loop.first -%}{{- '<|im_start|>'", 1)
    renderer = ChatRenderer(byte_tokenizer(head_only.replace("{%- endfor", "{%- endif -%}{%- endfor"), eos="<|im_end|>"))
    system = {"role": "system", "content": content}
    assert Conversation(renderer).prompt([system, USER]).sources[1] == (TokenSource.SYSTEM, len(content))
    with pytest.raises(AgentError, match=r"loses messages\[1\] of role system"):
        Conversation(renderer).prompt([USER, system])
    with pytest.raises(AgentError, match=r"loses messages\[2\] of role system"):
        two_calls(renderer, renderer.tokenizer.encode("one<|im_end|>"), system)


def test_observation_that_adds_no_token_is_an_error() -> None:
    renderer = ChatRenderer(byte_tokenizer(CHATML, eos="<|im_end|>"), template=PLAIN_TEMPLATE)
    sampled = renderer.tokenizer.encode("one<|im_end|>")
    assert two_calls(renderer, sampled, {"role": "user", "content": "x"})[1].tolist()[-1] == renderer.tokenizer.id_of("x")
    with pytest.raises(AgentError, match="add no token"):
        two_calls(renderer, sampled, {"role": "user", "content": ""})


def test_special_text_in_a_user_message_does_not_shift_the_turns() -> None:
    renderer = chatml()
    user = {"role": "user", "content": "What does <|im_end|> mean? And <tool_call>?"}
    conversation = Conversation(renderer)
    first = conversation.prompt([user])
    sampled = renderer.tokenizer.encode("It ends<|im_end|>")
    turn = conversation.add([user], first, sampled)
    second = conversation.prompt([user, {"role": "assistant", "content": turn.text}, USER])
    assert second.token_ids[: len(first.token_ids) + len(sampled)].tolist() == [*first.token_ids.tolist(), *sampled.tolist()]


def test_template_that_knows_no_reasoning_keeps_all_of_a_turn() -> None:
    renderer = chatml()
    sampled = renderer.tokenizer.encode("<think>why</think>\n\none<|im_end|>")
    first, second, _ = two_calls(renderer, sampled, USER)
    assert second[: len(first) + len(sampled)].tolist() == [*first.tolist(), *sampled.tolist()]


def test_no_text_can_pass_for_a_sampled_turn() -> None:
    renderer = chatml()
    words = {"role": "tool", "content": "zqSmoltturn1qz zqSmoltxturn1qz zqRmoltturn1qz"}
    sampled = renderer.tokenizer.encode("one<|im_end|>")
    first, second, _ = two_calls(renderer, sampled, words)
    assert second[: len(first) + len(sampled)].tolist() == [*first.tolist(), *sampled.tolist()]
    assert words["content"] in renderer.tokenizer.decode(second)


def test_short_observation_is_found_where_it_stands(renderer: ChatRenderer) -> None:
    conversation = Conversation(renderer)
    first = conversation.prompt([USER])
    turn = conversation.add([USER], first, renderer.tokenizer.encode("x<|end|>"))
    second = conversation.prompt([USER, {"role": "assistant", "content": turn.text}, {"role": "tool", "content": "1"}])
    assert second.sources[-3:] == ((TokenSource.TEMPLATE, 1), (TokenSource.TOOL, 1), (TokenSource.TEMPLATE, 2))


def test_content_that_the_template_itself_writes_is_found_where_it_stands() -> None:
    # <|im_start|> user \n | user | <|im_end|> \n <|im_start|> assistant \n
    first = Conversation(chatml()).prompt([{"role": "user", "content": "user"}])
    assert first.sources == ((TokenSource.TEMPLATE, 6), (TokenSource.USER, 4), (TokenSource.TEMPLATE, 13))
    # "User: Hi": the blank of the template and the first letter are one token, which is of the content
    spaced = ChatRenderer(byte_tokenizer(CHATML.replace("'\n' + message", "': ' + message"), eos="<|im_end|>", merges=(("Ġ", "H"),)))
    first = Conversation(spaced).prompt([{"role": "user", "content": "Hi"}])
    assert first.sources == ((TokenSource.TEMPLATE, 6), (TokenSource.USER, 2), (TokenSource.TEMPLATE, 13))


KIMI = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['role'] == 'tool' -%}{{- '## Return of ' + (message['tool_call_id'] or '') + '\n' -}}{%- endif -%}"
    "{{- message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}{{- call['id'] + ' ' + (call['function']['arguments'] | tojson) -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def test_format_with_call_ids_shows_the_ids_that_the_model_wrote_and_no_other() -> None:
    renderer = ChatRenderer(byte_tokenizer(KIMI, eos="<|im_end|>"))
    sampled = renderer.tokenizer.encode("functions.get:0 {}<|im_end|>")
    _, second, _ = two_calls(renderer, sampled, {"role": "tool", "content": "42", "tool_call_id": "functions.get:0"})
    assert "## Return of functions.get:0\n42" in renderer.tokenizer.decode(second)
    for result in ({"role": "tool", "content": "42"}, {"role": "tool", "content": "42", "tool_call_id": "call_minted"}):
        with pytest.raises(AgentError, match="which the model did not write"):
            two_calls(renderer, sampled, result)


def test_a_first_prompt_is_laid_out_once_for_all_members_of_its_group() -> None:
    renderer = chatml()
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Ho", "Hi")]
    first, other, again = (renderer.layout(chat, {}) for chat in chats)
    assert again is first and other.text == first.text.replace("Hi", "Ho")
    assert renderer.layout(chats[0], {}, add_generation_prompt=False).text == "<|im_start|>user\nHi<|im_end|>\n"


def test_sources_name_who_wrote_what(renderer: ChatRenderer) -> None:
    conversation = Conversation(renderer)
    system = {"role": "system", "content": "abc"}
    first = conversation.prompt([system, USER])
    # <|system|> abc <|end|><|user|> Hi <|end|><|assistant|>
    assert first.sources == (
        (TokenSource.TEMPLATE, 1),
        (TokenSource.SYSTEM, 3),
        (TokenSource.TEMPLATE, 2),
        (TokenSource.USER, 2),
        (TokenSource.TEMPLATE, 2),
    )
    turn = conversation.add([system, USER], first, renderer.tokenizer.encode("x<|end|>"))
    said = {"role": "assistant", "content": turn.text}
    second = conversation.prompt([system, USER, said, {"role": "tool", "content": "42"}, {"role": "user", "content": "so"}])
    # after the history: <|tool|> 42 <|end|><|user|> so <|end|><|assistant|>
    assert second.sources[len(first.sources) :] == (
        (TokenSource.HISTORY, 2),
        (TokenSource.TEMPLATE, 1),
        (TokenSource.TOOL, 2),
        (TokenSource.TEMPLATE, 2),
        (TokenSource.OBSERVATION, 2),
        (TokenSource.TEMPLATE, 2),
    )


@pytest.mark.parametrize("is_named", [True, False])
def test_an_example_that_reads_like_the_answer_is_not_taken_for_it(is_named: bool) -> None:
    # Taken for the sampled turn, the example would leave the true one behind it, and the question would be shown twice.
    renderer = chatml(merges=(("e", "s"),))
    encode = renderer.tokenizer.encode
    shown = [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}]
    conversation = Conversation(renderer)
    first = conversation.prompt(shown)
    sampled = np.concatenate([encode(text) for text in ("y", "e", "s", "<|im_end|>")])  # encoding "yes" gives two ids, not three
    turn = conversation.add(shown, first, sampled)
    answer = {"role": "assistant", "content": turn.text} | ({TURN_KEY: 0} if is_named else {})
    second = conversation.prompt([*shown, answer, {"role": "user", "content": "Why?"}])
    glue = encode("\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert second.token_ids.tolist() == [*first.token_ids.tolist(), *sampled.tolist(), *glue.tolist()]
