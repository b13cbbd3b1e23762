"""The shipped agents, on real rows and against a scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from molt.agents import AgentRunner
from molt.agents.episode import Episode, EpisodeIds, EpisodeLimits, run_episode
from molt.agents.load import load_agent
from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.config import DataSettings
from molt.data.prompts import Prompt, PromptSet
from molt.data.tiny_vision import make_pictures, make_processor
from molt.places import folder
from molt.rollout.engine import Sampling
from tests.agents.scripted import ScriptedEngine

GSM8K = Path(__file__).parents[1] / "data" / "fixtures" / "gsm8k_8.jsonl"


async def run(name: str, prompt: Prompt, renderer: ChatRenderer, *script: str) -> tuple[Episode, ScriptedEngine]:
    runner = load_agent(folder("examples") / f"{name}.py").runner()
    engine = ScriptedEngine(renderer.tokenizer, *script, processor=renderer.processor)
    await runner.start()
    try:
        episode = await run_episode(
            runner,
            prompt,
            engine.generate,
            renderer,
            limits=EpisodeLimits(max_turns=6, max_len=4096, timeout_s=60),
            sampling=Sampling(max_new_tokens=256),
            ids=EpisodeIds(group_id="g", member=0, try_number=0, group_size=1, epoch=0, engine="e"),
        )
    finally:
        await runner.close()
    return episode, engine


def math_module() -> ModuleType:
    return sys.modules[load_agent(folder("examples") / "math_agent.py").runner.__module__]


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        ("16-3-4=9, times 2 is \\boxed{18} dollars.", "9 * 2 = 18\n#### 18", 1.0),
        ("The answer is 18", "#### 18", 1.0),
        ("\\boxed{17}", "#### 18", 0.0),
        ("I do not know.", "#### 18", 0.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{x^{2}}", "x^2", 1.0),
        ("\\boxed{1,000}", "#### 1000", 1.0),
        ("\\boxed{5}", "", None),
    ],
)
def test_math_grader_reads_answers_as_written(answer: str, label: str, reward: float | None) -> None:
    assert math_module().grade(answer, label) == reward


async def test_math_agent_grades_a_real_question(renderer: ChatRenderer) -> None:
    prompts = PromptSet.load(GSM8K, DataSettings(input_key="question", label_key="answer"))
    episode, _ = await run("math_agent", prompts[0], renderer, "She makes \\boxed{18} dollars.")
    assert episode.reward == 1.0 == episode.outcome and episode.stop_reason == "terminated"


async def test_math_answer_that_hangs_the_grader_is_unscorable(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_module(), "TIMEOUT_S", 2.0)
    prompt = Prompt(prompt_id="p", prompt_index=0, messages=({"role": "user", "content": "?"},), label="1")
    episode, _ = await run("math_agent", prompt, renderer, "\\boxed{9^{9^{9^{9}}}}")
    assert episode.reward is None and episode.metrics == {"is_unscorable": 1.0}


@pytest.mark.parametrize(
    ("said", "reward", "observed"),
    [
        (("<calc>37+58</calc>", "95"), 1.0, "<|tool|>95<|end|>"),
        (("<calc>37+</calc>", "95"), 1.0, "<|tool|>error: not a sum<|end|>"),
        (("<calc>__import__('os')</calc>", "0"), 0.0, "<|tool|>error: not a sum<|end|>"),
        (("94",), 0.0, None),
    ],
)
async def test_calculator_agent_calls_its_tool(
    prompt: Prompt, renderer: ChatRenderer, said: tuple[str, ...], reward: float, observed: str | None
) -> None:
    episode, engine = await run("calculator_agent", prompt, renderer, *said)
    assert episode.reward == reward and len(episode.segments) == 1
    assert observed is None or observed in engine.texts[1]


@pytest.mark.parametrize(("said", "reward"), [("95", 1.0), ("It is <answer>95</answer>, not 96", 1.0), ("37 + 58 = 95.", 1.0), ("96", 0.0)])
async def test_reasoning_gym_agent_reads_the_answer(prompt: Prompt, renderer: ChatRenderer, said: str, reward: float) -> None:
    episode, engine = await run("reasoning_gym_agent", prompt, renderer, said)
    assert episode.reward == reward and "Answer with the number only." in engine.texts[0]


async def test_reasoning_gym_tool_agent_shows_results_as_user_messages(prompt: Prompt, renderer: ChatRenderer) -> None:
    episode, engine = await run("reasoning_gym_tool_agent", prompt, renderer, "<calc>37 + 58</calc>", "95")
    assert episode.reward == 1.0 and episode.metrics == {"num_calls": 1.0}
    assert engine.texts[1].endswith("<|user|>Result: 95<|end|><|assistant|>")
    # The examples' assistant messages were not sampled: none of their tokens may be trained.
    (segment,) = episode.segments
    assert segment.n_trainable == segment.n_sampled == len(renderer.tokenizer.encode("<calc>37 + 58</calc><|end|>95<|end|>"))


async def test_calls_without_end_end_the_rollout(prompt: Prompt, renderer: ChatRenderer) -> None:
    episode, engine = await run("calculator_agent", prompt, renderer, "<calc>1+1</calc>")
    # Three calls are answered; the fourth is taken as the final answer.
    assert len(engine.prompts) == 4 and episode.reward == 0.0 and episode.metrics == {"num_calls": 3.0}


async def test_picture_is_shown_larger_after_a_wrong_answer(tmp_path: Path) -> None:
    make_processor(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "idefics3"}')
    seeing = ChatRenderer.for_agent(Tokenizer.load(tmp_path / "model"), AgentRunner, DataSettings())
    prompt = PromptSet.load(make_pictures(tmp_path / "shapes", num_prompts=1, num_pixels=48), DataSettings())[0]
    wrong = str(int(prompt.label) + 1)
    for script, reward, turns in (((prompt.label,), 1.0, 1), ((wrong, f"I see {prompt.label}"), 0.5, 2), ((wrong, wrong), 0.0, 2)):
        episode, engine = await run("count_shapes_agent", prompt, seeing, *script)
        assert (episode.reward, episode.num_turns) == (reward, turns)
        assert [(image.width, image.height) for image in engine.images[-1]] == [(48, 48), (96, 96)][:turns]


def test_pictures_show_as_many_circles_as_they_say(tmp_path: Path) -> None:
    """A circle leaves the corners of its box white, a square does not."""
    prompts = PromptSet.load(make_pictures(tmp_path, num_prompts=12, num_pixels=400), DataSettings())
    for prompt in prompts:
        pixels = np.asarray(prompt.images[0].decoded())
        is_drawn = (pixels < 250).any(-1)
        num_circles = 0
        for row in range(4):
            for column in range(4):
                cell = is_drawn[row * 100 : row * 100 + 100, column * 100 : column * 100 + 100]
                num_circles += bool(cell.any()) and not bool(cell[6:8, 6:8].any())
        assert num_circles == int(prompt.label)
