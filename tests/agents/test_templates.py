"""Over every template of the trl wheel: what the probe sees, and that glue and observations are those of the template's own render."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from molt.agents.conversation import Conversation
from molt.agents.env import Tool
from molt.agents.probe import check_template, probe_template
from molt.agents.render import ChatRenderer
from molt.agents.template import ReasoningForm, common_length
from molt.agents.toolcalls import parse_tool_calls
from molt.errors import AgentError, SettingError
from tests.agents.tokenizers_for_tests import byte_tokenizer

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TOOL = Tool(name="zzcall", description="A tool")
USER = {"role": "user", "content": "zzquestion"}
AGAIN = {"role": "user", "content": "zzagain"}
# Ends of a call that these models' generation_config.json names beside the end of a turn.
FURTHER_ENDS = ("<|call|>", "<|observation|>", "<|user|>", "<|END_OF_TURN_TOKEN|>", "<|tool_response>")

# Measured: these refuse or lose a tool result, all others show it.
NO_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
# Measured: these show no calls of foreign assistant messages.
NO_CALLS = {*NO_RESULTS, "deepseek_r1_distill", "idefics3", "lfm2", "llama3", "qwen2_5_vl", "smolvlm"}
# Measured: these leave reasoning of earlier turns out once a user turn follows.
DROP_REASONING = {
    *("deepseek_r1_distill", "deepseekv3", "deepseekv3_training"),
    *("diffusion_gemma", "diffusion_gemma_training", "gemma4_v5", "glm4moe", "glm4moe_training", "gptoss", "gptoss_training"),
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "nemotron_3_5_lightning", "nemotron_3_5_lightning_training"),
    *("nemotron_3_nano", "nemotron_3_nano_training", "nemotron_3_super", "nemotron_3_super_training"),
    *("nemotron_3_ultra", "nemotron_3_ultra_training", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
}
UNESCAPED = {"lfm2_2_5", "lfm2_2_5_v2"}
"""A quote within a string ends it there."""
ONE_CALL_A_TURN = {"llama3_1", "llama3_2"}


def make_renderer(name: str, *, tools: tuple[Tool, ...] = (TOOL,)) -> ChatRenderer:
    source = (FOLDER / f"{name}.jinja").read_text()
    ends = tuple(text for text in FURTHER_ENDS if text in source)
    return ChatRenderer(byte_tokenizer(source, ends=ends, special=("</think>",) if "</think>" in source else ()), tools=tools)


KINDS = {"zzkey": "string", "zznum": "integer", "zzflag": "boolean", "zzlist": "array", "zzmap": "object"}
ARGUMENTS = {"zzkey": "a \"b\" 'c'\n<d> & e", "zznum": 3, "zzflag": True, "zzlist": [1, "b", None], "zzmap": {"f": 0.5}}
TYPED = Tool(
    name="zzcall",
    description="A tool",
    parameters={"type": "object", "properties": {key: {"type": kind, "description": key} for key, kind in KINDS.items()}},
)


def family(name: str) -> str:
    return name.removesuffix("_training")


@pytest.mark.parametrize("name", NAMES)
def test_probe_sees_what_was_measured(name: str) -> None:
    probe = probe_template(make_renderer(name))
    assert probe.takes_tool_results == (family(name) not in NO_RESULTS)
    assert probe.shows_calls == (family(name) not in NO_CALLS)
    assert probe.drops_old_reasoning == (name in DROP_REASONING)
    assert probe.takes_mappings == (name != "deepseekv3")
    assert probe.has_parts == (family(name) in {"idefics3", "llava_next", "smolvlm"})


def native(renderer: ChatRenderer, assistant: dict, after: list[dict]) -> tuple[np.ndarray, str | None, str]:
    """Ids that the policy would sample for a native assistant turn, what its template writes after them, and the whole render."""
    prompt = renderer.text([USER], add_generation_prompt=True)
    closed = renderer.text([USER, assistant], add_generation_prompt=False)
    whole = renderer.text([USER, assistant, *after], add_generation_prompt=True)
    start = next((place for place, (a, b) in enumerate(zip(prompt, closed, strict=False)) if a != b), min(len(prompt), len(closed)))
    marks = list(renderer.tokenizer.special_pattern.finditer(closed, start))
    ends = [mark.end() for mark in marks if renderer.tokenizer.id_of(mark.group()) in renderer.stop_token_ids]
    end = ends[0] if ends else len(closed)
    after_text = whole[end:] if whole.startswith(closed[:end]) else None
    return renderer.tokenizer.encode(closed[start:end]), after_text, whole


def take_turn(renderer: ChatRenderer, sampled: np.ndarray, after: list[dict]) -> tuple[np.ndarray, np.ndarray, str]:
    """Ids of history, of the next prompt, and why that prompt would open a segment."""
    conversation = Conversation(renderer)
    first = conversation.prompt([USER])
    turn = conversation.add([USER], first, sampled)
    second = conversation.prompt([USER, {"role": "assistant", "content": turn.text}, *after])
    return np.concatenate([first.token_ids, sampled]), second.token_ids, second.opened_by


def calls_of(*numbers: int) -> dict:
    calls = [
        {"type": "function", "id": f"zzid0000{n}", "function": {"name": "zzcall", "arguments": {"zzkey": f"zzvalue{n}"}}} for n in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def thoughtful(renderer: ChatRenderer) -> tuple[np.ndarray, str]:
    """Ids of a turn with reasoning as the model writes it, and the template's own render of a later prompt."""
    if renderer.template.reasoning_form is ReasoningForm.CONTENT:
        answer = {"role": "assistant", "content": "zzanswer"}
        whole = renderer.text([USER, answer, AGAIN], add_generation_prompt=True)
        return renderer.tokenizer.encode(f"zzthought\n</think>\n\nzzanswer{renderer.turn_end}"), whole
    turn = {"role": "assistant", "content": "zzanswer", "reasoning_content": "zzthought", "thinking": "zzthought"}
    sampled, _, whole = native(renderer, turn, [AGAIN])
    return sampled, whole


def call_with(arguments: object) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "zzcall", "arguments": arguments}}],
    }


def results_of(*numbers: int) -> list[dict]:
    return [{"role": "tool", "name": "zzcall", "tool_call_id": f"zzid0000{n}", "content": f"zzresult{n}"} for n in numbers]


@pytest.mark.parametrize("name", NAMES)
def test_glue_before_a_user_turn_is_the_templates_own(name: str) -> None:
    renderer = make_renderer(name)
    sampled, after_text, whole = native(renderer, {"role": "assistant", "content": "zzanswer"}, [AGAIN])
    history, prompt, _ = take_turn(renderer, sampled, [AGAIN])
    assert np.array_equal(prompt[: len(history)], history)
    glue = renderer.tokenizer.decode(prompt[len(history) :])
    assert whole.endswith(glue)
    assert after_text is None or glue == after_text


@pytest.mark.parametrize("numbers", [(0,), (0, 1)], ids=["one", "parallel"])
@pytest.mark.parametrize("name", [name for name in NAMES if family(name) not in NO_RESULTS])
def test_tool_results_are_the_suffix_of_the_full_render(name: str, numbers: tuple[int, ...]) -> None:
    renderer = make_renderer(name)
    assistant = calls_of(*numbers) if renderer.template.shows_calls else {"role": "assistant", "content": "zzanswer"}
    if name in ONE_CALL_A_TURN and len(numbers) > 1:
        with pytest.raises(AgentError, match="single tool-call"):
            take_turn(renderer, renderer.tokenizer.encode("two calls"), results_of(*numbers))
        return
    sampled, after_text, whole = native(renderer, assistant, results_of(*numbers))
    history, prompt, _ = take_turn(renderer, sampled, results_of(*numbers))
    assert np.array_equal(prompt[: len(history)], history)
    glue = renderer.tokenizer.decode(prompt[len(history) :])
    assert whole.endswith(glue)
    assert all(f"zzresult{n}" in glue for n in numbers)
    assert after_text is None or glue == after_text


@pytest.mark.parametrize("name", sorted(NO_RESULTS))
def test_template_that_loses_tool_results_is_an_error_and_still_chats(name: str) -> None:
    renderer = make_renderer(name)
    for content in ("zzresult0", "zzquestion", ""):  # new, said before, nothing: none is a silent loss
        with pytest.raises(AgentError, match=r"loses|refuses"):
            take_turn(renderer, renderer.tokenizer.encode("zzanswer"), [results_of(0)[0] | {"content": content}])
    history, prompt, _ = take_turn(renderer, renderer.tokenizer.encode("zzanswer"), [AGAIN])
    assert np.array_equal(prompt[: len(history)], history)


@pytest.mark.parametrize("name", sorted(DROP_REASONING))
def test_dropped_reasoning_opens_a_new_segment_with_real_ids(name: str) -> None:
    renderer = make_renderer(name)
    sampled, whole = thoughtful(renderer)
    history, prompt, opened_by = take_turn(renderer, sampled, [AGAIN])
    text = renderer.tokenizer.decode(prompt)
    assert not np.array_equal(prompt[: len(history)], history)
    assert opened_by == "template"
    assert "zzthought" not in text and "zzanswer" in text
    # gpt-oss ends its last turn with <|return|> and earlier ones with <|end|>; the id that was sampled stays.
    assert text == whole or (name.startswith("gptoss") and text.replace("<|return|>", "<|end|>") == whole)


@pytest.mark.parametrize("spelled", ["zzvalue0", "</think>"])
@pytest.mark.parametrize(
    "name", sorted(name for name in DROP_REASONING if not name.startswith(("deepseek", "gptoss")) and name == family(name))
)
def test_call_made_after_reasoning_is_shown_without_it_once_a_user_turn_follows(name: str, spelled: str) -> None:
    renderer = make_renderer(name)
    thought = {"reasoning_content": "zzthought", "thinking": "zzthought"}
    asked = call_with({"zzkey": spelled}) | thought
    asked["tool_calls"][0]["id"] = "zzid00000"
    stops = renderer.stop_token_ids
    conversation, chat, mirror = Conversation(renderer), [USER], [USER]
    for turn, after in ((asked, results_of(0)), ({"role": "assistant", "content": "zzanswer"} | thought, [AGAIN])):
        before, closed = renderer.text(mirror, add_generation_prompt=True), renderer.text([*mirror, turn], add_generation_prompt=False)
        start = common_length(before, closed)
        ends = [
            mark.end()
            for mark in renderer.tokenizer.special_pattern.finditer(closed, start)
            if renderer.tokenizer.id_of(mark.group()) in stops
        ]
        sampled = conversation.add(chat, conversation.prompt(chat), renderer.tokenizer.encode(closed[start : [*ends, len(closed)][0]]))
        chat, mirror = [*chat, {"role": "assistant", "content": sampled.text}, *after], [*mirror, turn, *after]
    text = renderer.tokenizer.decode(conversation.prompt(chat).token_ids)
    assert text == renderer.text(mirror, add_generation_prompt=True)
    assert "zzthought" not in text and spelled in text


@pytest.mark.parametrize("name", sorted(DROP_REASONING))
def test_kept_history_continues_even_where_the_template_drops_reasoning(name: str) -> None:
    renderer = make_renderer(name)
    sampled, _ = thoughtful(renderer)
    conversation = Conversation(renderer, keep_history=True)
    first = conversation.prompt([USER])
    turn = conversation.add([USER], first, sampled)
    second = conversation.prompt([USER, {"role": "assistant", "content": turn.text}, AGAIN])
    history = np.concatenate([first.token_ids, sampled])
    assert np.array_equal(second.token_ids[: len(history)], history)


@pytest.mark.parametrize(("name", "num_bos"), [("llama3", 1), ("gemma", 1), ("qwen3", 0), ("phi3", 0)])
def test_ids_have_as_many_bos_as_the_template_writes(name: str, num_bos: int) -> None:
    renderer = make_renderer(name, tools=())
    prompt = Conversation(renderer).prompt([USER])
    assert int((prompt.token_ids == renderer.tokenizer.inner.bos_token_id).sum()) == num_bos == probe_template(renderer).num_bos


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3_5_think", "glm4moe", "deepseekv3"])
def test_arguments_as_string_and_as_mapping_give_one_render(name: str) -> None:
    renderer = make_renderer(name)
    texts = set()
    for arguments in ({"a": 1, "b": [2, 3]}, '{"a": 1, "b": [2, 3]}'):
        assistant = call_with(arguments)
        texts.add(renderer.text([USER, assistant], add_generation_prompt=False))
    assert len(texts) == 1
    assert '\\"a\\"' not in texts.pop()


@pytest.mark.parametrize("arguments", ["not json", "[1, 2]", "", None])
def test_arguments_that_are_no_object_never_crash_a_render(arguments: str | None) -> None:
    renderer = make_renderer("qwen3_5_think")
    assistant = call_with(arguments)
    assert "zzcall" in renderer.text([USER, assistant], add_generation_prompt=False)


def test_template_that_hides_tools_is_refused_for_an_agent_with_tools() -> None:
    renderer = make_renderer("llama3")
    with pytest.raises(SettingError, match="does not show them"):
        check_template(renderer, probe_template(renderer), num_tools=1)


def test_template_that_refuses_chat_is_refused_at_start() -> None:
    with pytest.raises(SettingError, match=r"cannot be used.*no chat for you"):
        ChatRenderer(byte_tokenizer("{{ raise_exception('no chat for you') }}"))


@pytest.mark.parametrize("name", [name for name in NAMES if family(name) not in NO_CALLS])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_call_as_the_template_writes_it_is_read_back(name: str, num_calls: int) -> None:
    if num_calls > 1 and family(name) in {*ONE_CALL_A_TURN, "gptoss"}:
        return
    arguments = ARGUMENTS | ({"zzkey": "a\n<b>"} if name in UNESCAPED else {})
    call = {"type": "function", "id": "zzid00000", "function": {"name": "zzcall", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call] * num_calls}]
    said = make_renderer(name, tools=(TYPED,)).text(messages, add_generation_prompt=False).split("zzquestion")[-1]
    for marker in ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|start_header_id|>assistant<|end_header_id|>", "<|im_start|>assistant"):
        said = said.replace(marker, "")  # no part of what a model samples, or the end of it
    calls = parse_tool_calls(said, {"zzcall": TYPED.parameters})
    assert [(found.name, found.problem) for found in calls] == [("zzcall", None)] * num_calls
    assert all(found.arguments == arguments for found in calls)
