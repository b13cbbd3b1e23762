"""Before anything is started: agent, tokenizer, template and prompts are tried together, and all that is wrong is said at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from molt.agents.env import AgentRunner, Env
from molt.agents.load import LoadedAgent, load_agent
from molt.agents.probe import TemplateProbe, check_template, check_tokenizer, probe_template
from molt.agents.render import ChatRenderer, no_images
from molt.agents.tokenizer import Tokenizer
from molt.config import Config
from molt.data.prompts import PromptSet
from molt.errors import AgentError, MoltError, SettingError

T = TypeVar("T")
SHOWN_LONG = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a run is about to use."""

    agent: LoadedAgent
    renderer: ChatRenderer
    probe: TemplateProbe
    prompts: PromptSet
    eval_prompts: PromptSet | None
    num_too_long: int | None
    """Prompts that leave no room below data.max_len; None when the agent makes its first prompt itself, so that nobody can tell."""


def preflight(config: Config) -> Preflight:
    """Try everything that needs no engine. SettingError lists every problem found."""
    problems: list[str] = []

    def attempt(step: Callable[[], T]) -> T | None:
        try:
            return step()
        except MoltError as error:
            problems.append(str(error))
            return None

    agent = attempt(lambda: load_agent(_needed(config.train.agent_path, "train.agent_path", "a Python file that exports AgentRunner")))
    tokenizer = attempt(lambda: Tokenizer.load(_needed(config.actor.model_name_or_path, "actor.model_name_or_path", "a model folder")))
    path = attempt(lambda: _needed(config.data.prompt_dataset, "data.prompt_dataset", "a JSONL or Parquet file, or a data set folder"))
    prompts = attempt(lambda: PromptSet.load(path, config.data)) if path else None
    eval_path = config.data.eval_dataset
    eval_prompts = attempt(lambda: PromptSet.load(eval_path, config.data, setting="data.eval_dataset")) if eval_path else None
    renderer = probe = None
    if tokenizer is not None:
        attempt(lambda: check_tokenizer(tokenizer))
        runner = agent.runner if agent is not None else AgentRunner
        renderer = attempt(lambda: ChatRenderer.for_agent(tokenizer, runner, config.data))
    if renderer is not None:
        probe = attempt(lambda: probe_template(renderer))
    if renderer is not None and probe is not None:
        attempt(lambda: check_template(renderer, probe, num_tools=len(renderer.template.tools)))
    blind = [] if renderer is None else [line for found in (prompts, eval_prompts) if found for line in _blind(found, renderer)]
    problems += blind
    num_too_long = None
    if not blind and renderer is not None and agent is not None and not _makes_own_prompt(agent.runner):
        for found in (prompts, eval_prompts):
            if found is not None:
                check = partial(check_lengths, found, renderer, max_len=config.data.max_len)
                num_too_long = (num_too_long or 0) + (attempt(check) or 0)
    if problems:
        head = "" if len(problems) == 1 else f"{len(problems)} settings are wrong:\n  "
        raise SettingError(head + "\n  ".join(problems))
    assert agent is not None and renderer is not None and probe is not None and prompts is not None, "nothing is missing without a problem"
    return Preflight(agent=agent, renderer=renderer, probe=probe, prompts=prompts, eval_prompts=eval_prompts, num_too_long=num_too_long)


def _blind(prompts: PromptSet, renderer: ChatRenderer) -> list[str]:
    """What is wrong with prompts of a model that takes no images."""
    shown = [prompt.prompt_index for prompt in prompts if prompt.images]
    if not shown or renderer.processor is not None:
        return []
    name = renderer.tokenizer.name
    return [
        f"actor.model_name_or_path={name}, {len(shown)} prompts hold images (the first is prompt {shown[0]}), which it does not take here "
        f"({no_images(name)}); take another model or other prompts"
    ]


def _needed(value: str | None, name: str, what: str) -> str:
    if value is None:
        raise SettingError(f"{name} is missing; give {what}")
    return value


def _makes_own_prompt(runner: type[AgentRunner]) -> bool:
    """Whether the first prompt is made by the agent, so that the rows alone do not tell its length."""
    env = runner.env
    is_plain = env is not None and env.reset is Env.reset and runner.make_env is AgentRunner.make_env
    return runner.run is not AgentRunner.run or not is_plain


def check_lengths(prompts: PromptSet, renderer: ChatRenderer, *, max_len: int) -> int:
    """Number of prompts that leave no room below max_len; SettingError when none leaves any, or one cannot be rendered."""
    too_long: list[tuple[int, int]] = []
    for prompt in prompts:
        try:
            length = renderer.length(prompt.messages)
        except AgentError as error:
            raise SettingError(f"prompt {prompt.prompt_index} cannot be rendered: {error}") from error
        if length >= max_len:
            too_long.append((prompt.prompt_index, length))
    if len(too_long) == len(prompts):
        shown = ", ".join(f"prompt {index} has {length} tokens" for index, length in too_long[:SHOWN_LONG])
        raise SettingError(f"data.max_len={max_len}, no prompt leaves room to answer ({shown}); raise it")
    return len(too_long)
