"""What a training run needs and people get wrong, tried before anything is written: agent file, estimator, prompts."""

from __future__ import annotations

from typing import Any

from molt.config import Config
from molt.errors import SettingError
from molt.machine import version_of


def check_programs(config: Config) -> None:
    """Import the agent file and look up the estimator, which the agent file may bring. SettingError names what is wrong."""
    from molt.agents.load import load_agent

    if config.train.agent_path is not None:
        load_agent(config.train.agent_path)
    if version_of("torch") is not None:
        from molt.algo.estimators import get_estimator
        from molt.algo.loss import loss_names
        from molt.algo.rules import check_estimator

        if config.algo.loss.name not in loss_names():
            raise SettingError(f"algo.loss.name={config.algo.loss.name} is unknown; known are {', '.join(loss_names())}")
        chosen = get_estimator(config.algo.advantage.estimator)
        check_estimator(config.algo, name=chosen.name, uses=chosen.uses, needs=chosen.needs)


def check_prompts(config: Config) -> dict[str, dict[str, Any]]:
    """Read the prompt sets from end to end; number and digest of each. SettingError or DataError names file and line."""
    from molt.data.prompts import PromptSet

    found: dict[str, dict[str, Any]] = {}
    for name in ("prompt_dataset", "eval_dataset"):
        path = getattr(config.data, name)
        if path is not None:
            prompts = PromptSet.load(path, config.data)
            found[name] = {"path": path, "num_prompts": len(prompts), "digest": prompts.digest}
    return found
