"""Images in a chat: one placeholder is sent, its expansion is kept, and neither is ever cut or made twice.

The tiny processor makes one tile of each image: <fake> <global-img> <image>*4 <fake>, seven tokens of which four are features.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import molt.agents as agents
from molt.agents.episode import Episode, EpisodeIds, EpisodeLimits, run_episode
from molt.agents.media import segment_media
from molt.agents.policy import join_generations
from molt.agents.render import ChatRenderer
from molt.agents.segments import SegmentDraft
from molt.agents.tokenizer import Tokenizer
from molt.config import DataSettings
from molt.data.messages import image_part, text_part
from molt.data.processor import ImageProcessor, PlacedImage, contract, named_tensors
from molt.data.prompts import Prompt
from molt.data.tiny_vision import make_processor
from molt.errors import AgentError, LineageError, PromptTooLongError, SettingError
from molt.log.rows import TokenSource, to_arrow
from molt.rollout.engine import FinishReason, Sampling
from molt.schema import validate
from tests.agents.scripted import ScriptedEngine, generation
from tests.log.test_rows import with_lsn

IM, P, T, U = TokenSource.IMAGE, TokenSource.POLICY, TokenSource.TEMPLATE, TokenSource.USER


def picture(colour: str, size: tuple[int, int] = (20, 12)) -> agents.Image:
    return agents.Image.of(PIL.Image.new("RGB", size, colour))


RED, BLUE = picture("red"), picture("blue")


def model_folder(folder: Path, *, num_tiles: int) -> Path:
    make_processor(folder, num_tiles=num_tiles)
    (folder / "config.json").write_text('{"model_type": "idefics3"}')
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """The renderer of a model that takes images."""
    folder = model_folder(tmp_path_factory.mktemp("one-tile"), num_tiles=1)
    return ChatRenderer.for_agent(Tokenizer.load(folder), agents.AgentRunner, DataSettings())


@pytest.fixture(scope="module")
def processor(seeing: ChatRenderer) -> ImageProcessor:
    assert seeing.processor is not None
    return seeing.processor


def asked(*parts: str | agents.Image) -> Prompt:
    content = [image_part(part) if isinstance(part, agents.Image) else text_part(part) for part in parts]
    return Prompt(prompt_id="p", prompt_index=0, messages=({"role": "user", "content": content},), label="1")


class AskingEnv(agents.Env):
    """Shows one more picture after each answer, three in all."""

    num_steps = 0

    async def step(self, action: agents.Action) -> agents.Result:
        self.num_steps += 1
        if self.num_steps == 3:
            return agents.Result(terminated=True, truncated=False, reward=1.0)
        return agents.Result(terminated=False, truncated=False, observation=agents.Observation.user("and ", BLUE))


class Runner(agents.AgentRunner):
    env = AskingEnv


async def run(renderer: ChatRenderer, prompt: Prompt, *script, **limits) -> tuple[Episode, ScriptedEngine]:
    engine = ScriptedEngine(renderer.tokenizer, *script, processor=renderer.processor)
    ids = EpisodeIds(group_id="e0-p0", member=0, try_number=0, group_size=1, epoch=0, engine="engine-0")
    bounds = {"max_turns": 5, "max_len": 400, "timeout_s": 5.0} | limits
    limits_of = EpisodeLimits(**bounds)
    episode = await run_episode(Runner(), prompt, engine.generate, renderer, limits=limits_of, sampling=Sampling(max_new_tokens=8), ids=ids)
    return episode, engine


def test_observation_holds_images_between_texts(seeing: ChatRenderer, processor: ImageProcessor) -> None:
    results = agents.Observation.tool("42", ["The crop: ", BLUE], RED, call_ids=["a", "b", "c"])
    assert [message["content"] for message in results.messages] == ["42", [text_part("The crop: "), image_part(BLUE)], [image_part(RED)]]
    assert agents.Observation.user("a ", "b").messages[0]["content"] == "a b"
    messages = (*asked("What?").messages, {"role": "assistant", "content": "zoom"}, *results.messages)
    (gap,) = seeing.layout(messages, {}).gaps
    assert [placed.expansion.image for placed in gap.images] == [BLUE, RED]
    assert int((gap.token_ids == processor.placeholder_id).sum()) == 2 * 4


SPEAKERS = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""In the manner of SmolVLM: parts only, speakers by name, and a finished turn opened otherwise than the generation prompt."""


async def test_template_that_takes_parts_only_shows_images_in_every_turn(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, num_tiles=1)
    (folder / "chat_template.jinja").write_text(SPEAKERS)
    seeing = ChatRenderer.for_agent(Tokenizer.load(folder), agents.AgentRunner, DataSettings())
    assert seeing.template.has_parts and seeing.turn_end == "<end_of_utterance>"
    said = [generation(seeing.tokenizer.encode(f" {word}<end_of_utterance>").tolist()) for word in ("one", "two", "three")]
    episode, engine = await run(seeing, asked(RED, "How many?"), *said)
    (segment,) = episode.segments  # what was sampled stays as sampled, though the template would write a blank before it
    assert engine.texts == [
        "User:<image>How many?<end_of_utterance>\nAssistant:",
        "User:<image>How many?<end_of_utterance>\nAssistant: one<end_of_utterance>\nUser: and <image><end_of_utterance>\nAssistant:",
        "User:<image>How many?<end_of_utterance>\nAssistant: one<end_of_utterance>\nUser: and <image><end_of_utterance>\nAssistant: two"
        "<end_of_utterance>\nUser: and <image><end_of_utterance>\nAssistant:",
    ]
    assert engine.images[-1] == [RED, BLUE, BLUE] and len(segment.media or ()) == 3 * 3
    assert seeing.length(asked(RED, "How many?").messages) == len(seeing.layout(asked(RED, "How many?").messages, {}).gaps[0].token_ids)


def test_image_becomes_markers_and_features(processor: ImageProcessor, seeing: ChatRenderer) -> None:
    expansion = processor.expansion(RED)
    names = ["<fake_token_around_image>", "<global-img>", *["<image>"] * 4, "<fake_token_around_image>"]
    assert expansion.token_ids.tolist() == [seeing.tokenizer.id_of(name) for name in names]
    assert expansion.is_feature.tolist() == [False, False, True, True, True, True, False]
    assert [(part.name, part.payload.kind, part.payload.shape) for part in expansion.parts] == [
        ("image", "image", ()),
        ("pixel_attention_mask", "tensor", (1, 32, 32)),
        ("pixel_values", "tensor", (1, 3, 32, 32)),
    ]
    assert expansion.parts[0].payload.data == RED.data
    # Red is (1, 0, 0); mean and deviation of the processor are 0.5: every pixel is (1, -1, -1).
    assert np.unique(expansion.tensors()["pixel_values"][0, :, 4, 4]).tolist() == [-1.0, 1.0]


def test_as_many_images_are_remembered_as_fit(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [picture(colour) for colour in ("red", "green", "blue")]
    size = sum(part.payload.size_bytes for part in processor.expansion(pictures[0]).parts)
    monkeypatch.setattr("molt.data.processor.KEPT_BYTES", int(2.5 * size))
    fresh = ImageProcessor(processor.inner, name="model")
    for shown in pictures:
        fresh.expansion(shown)
    assert [fresh.knows(shown) for shown in pictures] == [False, True, True]
    assert np.array_equal(fresh.expansion(pictures[0]).token_ids, processor.expansion(pictures[0]).token_ids)


def test_members_of_a_group_that_ask_at_once_share_one_look_at_their_image(processor: ImageProcessor) -> None:
    num_looks = []

    class Slow:
        """The processor, which takes its time."""

        tokenizer, image_token = processor.inner.tokenizer, processor.inner.image_token

        def __call__(self, **given: Any) -> Any:
            num_looks.append(1)
            time.sleep(0.05)
            return processor.inner(**given)

    fresh, shown = ImageProcessor(Slow(), name="model"), picture("green")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(fresh.expansion, [shown] * 4))
    assert len(num_looks) == 1 and all(expansion is found[0] for expansion in found)


def test_segment_that_ends_inside_an_image_is_refused(processor: ImageProcessor) -> None:
    expansion = processor.expansion(picture("red"))
    placed = PlacedImage(expansion=expansion, position=1)
    ids = np.concatenate([[3], expansion.token_ids[:-1]]).astype(np.int32)
    draft = SegmentDraft(opened_by="start", first_difference=None, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), images=(placed,))
    with pytest.raises(LineageError, match="is not whole at tokens 1 to 8"):
        segment_media(draft)


def test_tiles_are_kept_in_order(tmp_path: Path) -> None:
    processor = ImageProcessor.load(model_folder(tmp_path, num_tiles=2))
    assert processor is not None
    # 64 pixels along the longer edge, tiles of 32: a row of two above nothing else, then the whole picture.
    expansion = processor.expansion(picture("red", (40, 10)))
    assert expansion.tensors()["pixel_values"].shape == (3, 3, 32, 32)
    assert int(expansion.is_feature.sum()) == 3 * 4
    assert processor.length(picture("blue", (40, 10))) == len(expansion.token_ids)


def test_two_forms_of_a_prompt_lead_to_each_other(processor: ImageProcessor) -> None:
    sent = np.array([7, processor.placeholder_id, 8, processor.placeholder_id], np.int32)
    whole, placed = processor.expand(sent, [RED, BLUE])
    assert len(whole) == 4 - 2 + 2 * 7 and [(image.position, image.end) for image in placed] == [(1, 8), (9, 16)]
    assert np.array_equal(contract(whole, placed, processor.placeholder_id), sent)
    with pytest.raises(LineageError, match="2 placeholders '<image>' for 1 images"):
        processor.expand(sent, [RED])
    with pytest.raises(LineageError, match=r"not whole at tokens 9 to 16 of 15"):
        contract(whole[:15], placed, processor.placeholder_id)


async def test_each_image_has_as_many_tokens_in_every_turn(seeing: ChatRenderer, processor: ImageProcessor) -> None:
    episode, engine = await run(seeing, asked("Look: ", RED), "one", "two", "three")
    placeholders = [prompt.count(processor.placeholder_id) for prompt in engine.prompts]
    assert placeholders == [1, 2, 3] and engine.images == [[RED], [RED, BLUE], [RED, BLUE, BLUE]]
    (segment,) = episode.segments
    assert int((segment.token_ids == processor.placeholder_id).sum()) == 3 * 4
    assert sum(span.len for span in segment.spans if span.source is IM) == 3 * 4
    assert [(medium.name, medium.len) for medium in segment.media or ()][::3] == [("image", 7)] * 3
    for medium in segment.media or ():
        shown = segment.token_ids[medium.position : medium.position + medium.len]
        assert np.array_equal(shown, processor.expansion(RED).token_ids)
    # Two pictures, each with its pixels; the mask of both is the same.
    assert sorted(payload.kind for payload in episode.payloads) == ["image", "image", "tensor", "tensor", "tensor"]
    validate("segments", with_lsn(to_arrow("segments", [segment], run="r", attempt=1, producer="p", seq=0)))


async def test_lineage_of_a_prompt_with_an_image_is_told_apart(seeing: ChatRenderer) -> None:
    episode, _ = await run(seeing, asked("Look: ", RED), "one", max_turns=1)
    spans = [(span.source, span.len) for span in episode.segments[0].spans]
    # <|user|> | "Look: " without its last blank | blank, <fake>, <global-img> | features | <fake>, <|end|>, <|assistant|> | "one", <|end|>
    assert spans == [(T, 1), (U, 5), (T, 3), (IM, 4), (T, 3), (P, 4)]


async def test_length_limit_cuts_before_an_image_and_never_through_it(seeing: ChatRenderer) -> None:
    whole, _ = await run(seeing, asked("Look: ", RED), "one", "two", "three", max_turns=2)
    (segment,) = whole.segments
    second = next(medium.position for medium in segment.media or () if medium.position > 20)
    for max_len in range(second, second + 8):
        episode, engine = await run(seeing, asked("Look: ", RED), "one", "two", "three", max_len=max_len)
        assert len(engine.prompts) == 1 and episode.stop_reason == "context"
        (cut,) = episode.segments
        assert {medium.position for medium in cut.media or ()} == {(segment.media or ())[0].position}
        assert sum(span.len for span in cut.spans if span.source is IM) == 4


async def test_first_prompt_that_does_not_fit_is_no_rollout(seeing: ChatRenderer) -> None:
    with pytest.raises(PromptTooLongError, match="the first prompt has 16 tokens"):
        await run(seeing, asked("Look: ", RED), "one", max_len=12)
    with pytest.raises(PromptTooLongError, match=r"the first prompt has 2 images, data\.max_images=1"):
        await run(seeing, asked(RED, BLUE), "one", max_images=1)


async def test_limit_of_images_ends_a_rollout_by_its_own_name(seeing: ChatRenderer) -> None:
    episode, engine = await run(seeing, asked(RED), "one", "two", "three", max_images=2)
    assert (episode.stop_reason, len(engine.prompts)) == ("images", 2)
    with pytest.raises(AgentError, match=r"has 20 x 12 pixels, data\.max_image_pixels=100"):
        await run(seeing, asked(RED), "one", max_image_pixels=100)


async def test_placeholder_that_the_policy_wrote_ends_a_rollout_before_the_next_image(
    seeing: ChatRenderer, processor: ImageProcessor
) -> None:
    said = generation([processor.placeholder_id, *seeing.tokenizer.encode("x<|end|>").tolist()])
    episode, engine = await run(seeing, asked(RED), said, "two")
    assert (episode.stop_reason, len(engine.prompts)) == ("images", 1)
    (segment,) = episode.segments
    # What was sampled is a token of the policy like any other: no feature.
    assert sum(span.len for span in segment.spans if span.source is IM) == 4
    assert int((segment.token_ids == processor.placeholder_id).sum()) == 5


async def test_prompt_that_the_engine_expands_otherwise_is_not_trained(seeing: ChatRenderer, processor: ImageProcessor) -> None:
    sent = seeing.layout(asked(RED).messages, {}).gaps[0].token_ids
    with pytest.raises(LineageError, match=r"consumed 9 prompt ids where 10 were meant, first different at 9"):
        await run(seeing, asked(RED), replace(generation([1]), prompt_ids=sent[:-1], finish_reason=FinishReason.LENGTH))
    engine = ScriptedEngine(seeing.tokenizer, "one")
    with pytest.raises(LineageError, match="the engine did not say which ids it made of them"):
        limits = EpisodeLimits(max_turns=1, max_len=99, timeout_s=5.0)
        ids = EpisodeIds(group_id="e0-p0", member=0, try_number=0, group_size=1, epoch=0, engine="e")
        await run_episode(Runner(), asked(RED), engine.generate, seeing, limits=limits, sampling=Sampling(max_new_tokens=8), ids=ids)


def test_prompt_of_a_call_that_was_cut_is_told_by_its_first_part_that_knows() -> None:
    empty = generation([], finish_reason=FinishReason.ABORT)
    parts = [empty, replace(generation([5, 6], finish_reason=FinishReason.ABORT), prompt_ids=np.array([1, 2], np.int32)), generation([7])]
    assert join_generations(parts).prompt_ids.tolist() == [1, 2]  # type: ignore[union-attr]
    later = [generation([5], finish_reason=FinishReason.ABORT), replace(generation([7]), prompt_ids=np.array([1, 2, 5], np.int32))]
    assert join_generations(later).prompt_ids.tolist() == [1, 2]  # type: ignore[union-attr]


def test_text_that_spells_the_placeholder_is_refused(seeing: ChatRenderer) -> None:
    with pytest.raises(AgentError, match=r"messages\[0\] spells <image>"):
        seeing.layout(({"role": "user", "content": "an <image> in words"},), {})


def test_model_without_eyes_refuses_images(renderer: ChatRenderer) -> None:
    with pytest.raises(AgentError, match=r"hold 1 images, and .* is no model whose images are supported"):
        renderer.layout(asked(RED).messages, {})


def test_length_of_a_prompt_is_known_from_the_size_of_its_images(seeing: ChatRenderer) -> None:
    prompt = asked("Look: ", RED, " and ", BLUE)
    assert seeing.length(prompt.messages) == len(seeing.layout(prompt.messages, {}).gaps[0].token_ids)


def test_placeholder_without_a_token_of_its_own_is_refused(processor: ImageProcessor) -> None:
    """A missing special token resolves to the unknown one: then every unknown token would count as an image."""
    tokenizer = processor.inner.tokenizer
    before = tokenizer.pad_token
    try:
        tokenizer.pad_token = "<image>"
        with pytest.raises(SettingError, match="no token of its own for '<image>'"):
            ImageProcessor(processor.inner, name="model")
    finally:
        tokenizer.pad_token = before


def test_tensors_of_one_batch_must_fit_each_other() -> None:
    small, large = {"pixel_values": np.zeros((1, 3, 2, 2))}, {"pixel_values": np.zeros((2, 3, 2, 4))}
    assert named_tensors([small, small])["pixel_values"].shape == (2, 3, 2, 2)
    with pytest.raises(LineageError, match="tensors of different shapes"):
        named_tensors([small, large])
