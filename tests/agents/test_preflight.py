"""Preflight: what is wrong with agent, tokenizer, template and prompts is said at once, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from molt.agents.preflight import preflight
from molt.config import ActorSettings, Config, DataSettings, TrainSettings
from molt.data.tiny import make_prompts, make_tokenizer
from molt.data.tiny_vision import make_pictures, make_processor
from molt.errors import SettingError

AGENT = """
import molt.agents as agents

class Once(agents.Env):
    async def step(self, action):
        return agents.Result(terminated=True, truncated=False)

class AgentRunner(agents.AgentRunner):
    env = Once
"""


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    make_tokenizer(tmp_path / "model")
    make_prompts(tmp_path / "prompts.jsonl", num_prompts=4)
    (tmp_path / "agent.py").write_text(AGENT)
    return {"model": str(tmp_path / "model"), "prompts": str(tmp_path / "prompts.jsonl"), "agent": str(tmp_path / "agent.py")}


def config(world: dict[str, str], **data) -> Config:
    return Config(
        actor=ActorSettings(model_name_or_path=world["model"]),
        train=TrainSettings(agent_path=world["agent"]),
        data=DataSettings(prompt_dataset=world["prompts"], **data),
    )


def test_good_world_says_what_will_be_used(world: dict[str, str]) -> None:
    found = preflight(config(world))
    assert len(found.prompts) == 4 and found.num_too_long == 0 and found.probe.turn_end == "<|end|>"


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    world = {"model": str(tmp_path / "empty"), "prompts": str(tmp_path / "none.jsonl"), "agent": str(tmp_path / "none.py")}
    with pytest.raises(SettingError) as error:
        preflight(config(world))
    text = str(error.value)
    assert text.startswith("3 settings are wrong")
    for said in ("it holds no tokenizer", "data.prompt_dataset=", "train.agent_path="):
        assert said in text


def test_pictures_are_for_models_that_take_them(world: dict[str, str], tmp_path: Path) -> None:
    prompts = str(make_pictures(tmp_path / "shapes", num_prompts=3))
    with pytest.raises(
        SettingError, match=r"3 prompts hold images \(the first is prompt 0\), .*\(model_type unknown; supported: idefics3, llava\)"
    ):
        preflight(config(world | {"prompts": prompts}))
    (Path(world["model"]) / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(SettingError, match="its tokens have positions of three axes"):
        preflight(config(world | {"prompts": prompts}))
    make_processor(tmp_path / "seeing")
    (tmp_path / "seeing" / "config.json").write_text('{"model_type": "idefics3"}')
    found = preflight(config(world | {"prompts": prompts, "model": str(tmp_path / "seeing")}, max_len=80))
    # <|user|>, seven tokens of the picture, 58 of the question, <|end|>, <|assistant|>: 68 of 80
    assert found.num_too_long == 0
    with pytest.raises(SettingError, match="prompt 0 has 68 tokens"):
        preflight(config(world | {"prompts": prompts, "model": str(tmp_path / "seeing")}, max_len=68))


def test_missing_settings_are_named() -> None:
    with pytest.raises(SettingError, match=r"(?s)train.agent_path is.*actor.model_name_or_path is.*data.prompt_dataset is missing"):
        preflight(Config())


def test_prompts_without_room_are_found_before_the_run(world: dict[str, str]) -> None:
    with pytest.raises(SettingError, match=r"data.max_len=4, no prompt leaves room to answer"):
        preflight(config(world, max_len=4))


def test_some_long_prompts_are_counted(world: dict[str, str]) -> None:
    # <|user|> 1+1 <|end|><|assistant|> is 6 ids and fits 8; the other has 15.
    Path(world["prompts"]).write_text("".join(json.dumps({"input": text}) + "\n" for text in ("1+1", "1+1+1+1+1+1")))
    assert preflight(config(world, max_len=8)).num_too_long == 1


def test_agent_that_makes_its_own_prompt_is_not_judged_by_the_rows(world: dict[str, str]) -> None:
    reset = "async def reset(self):\n        return agents.Observation.user('x' * 1000)"
    own = f"\nclass Own(Once):\n    {reset}\n\nAgentRunner.env = Own\n"
    Path(world["agent"]).write_text(AGENT + own)
    assert preflight(config(world, max_len=4)).num_too_long is None


def test_tools_that_the_template_hides_are_refused(world: dict[str, str]) -> None:
    Path(world["agent"]).write_text(AGENT + "    tools = (agents.Tool(name='zztool', description='d'),)\n")
    with pytest.raises(SettingError, match=r"AgentRunner.tools has 1 tools, the chat template .* does not show them"):
        preflight(config(world))
