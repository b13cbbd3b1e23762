"""The shipped agents against the embedded engine: real sampling, real graders, and rows that hold exactly what went through the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from molt.agents.episode import Episode, EpisodeIds, EpisodeLimits, run_episode
from molt.agents.load import load_agent
from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.config import DataSettings
from molt.data.images import Image
from molt.data.prompts import Prompt, PromptSet
from molt.data.tiny import make_model, make_prompts
from molt.log.rows import TokenSource
from molt.places import folder
from molt.rollout.embedded import EmbeddedEngine
from molt.rollout.engine import Generation, Sampling

GSM8K = Path(__file__).parents[1] / "data" / "fixtures" / "gsm8k_8.jsonl"


class Recorder:
    """The engine with everything that went in and out, by rollout."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.calls: list[tuple[list[int], Generation]] = []

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        answer = await self.engine.generate(request_id, prompt_ids, sampling, images)
        self.calls.append((list(prompt_ids), answer))
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_model(path)
    return path


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(str(model), max_len=512)
    await engine.start()
    yield engine
    await engine.stop()


async def episodes(name: str, prompts: Sequence[Prompt], model: Path, engine: EmbeddedEngine) -> list[tuple[Episode, Recorder]]:
    runner = load_agent(folder("examples") / f"{name}.py").runner()
    renderer = ChatRenderer.for_agent(Tokenizer.load(model), runner, DataSettings())
    await runner.start()
    done = []
    try:
        for number, prompt in enumerate(prompts):
            recorder = Recorder(engine)
            episode = await run_episode(
                runner,
                prompt,
                recorder.generate,
                renderer,
                limits=EpisodeLimits(max_turns=4, max_len=512, timeout_s=60),
                sampling=Sampling(max_new_tokens=12),
                ids=EpisodeIds(group_id=f"g{number}", member=0, try_number=0, group_size=1, epoch=0, engine="embedded-0"),
            )
            done.append((episode, recorder))
    finally:
        await runner.close()
    return done


async def test_rows_of_gsm8k_run_through_the_math_agent(model: Path, engine: EmbeddedEngine) -> None:
    prompts = PromptSet.load(GSM8K, DataSettings(input_key="question", label_key="answer"))
    for episode, recorder in await episodes("math_agent", list(prompts)[:4], model, engine):
        (prompt_ids, answer) = recorder.calls[0]
        (segment,) = episode.segments
        # An untrained model: wrong, not unscorable.
        assert episode.reward == 0.0
        assert segment.token_ids.tolist() == [*prompt_ids, *answer.token_ids.tolist()]
        assert np.array_equal(segment.behaviour_logprobs[len(prompt_ids) :], answer.logprobs)


async def test_turns_of_the_calculator_agent_are_the_engines_own_ids(model: Path, engine: EmbeddedEngine, tmp_path: Path) -> None:
    make_prompts(tmp_path / "sums.jsonl", num_prompts=8)
    for episode, recorder in await episodes(
        "calculator_agent", list(PromptSet.load(tmp_path / "sums.jsonl", DataSettings())), model, engine
    ):
        last_prompt, last_answer = recorder.calls[-1]
        (segment,) = episode.segments
        assert segment.token_ids.tolist() == [*last_prompt, *last_answer.token_ids.tolist()]
        is_sampled = np.repeat([span.source is TokenSource.POLICY for span in segment.spans], [span.len for span in segment.spans])
        sampled = np.concatenate([answer.logprobs for _, answer in recorder.calls])
        assert np.array_equal(segment.behaviour_logprobs[is_sampled], sampled)
