"""What a training run needs and people get wrong, tried before anything is written: inputs, agent, template, prompts, algorithm."""

from __future__ import annotations

from typing import Any

from molt.config import Config
from molt.errors import SettingError
from molt.machine import version_of


def try_everything(config: Config) -> dict[str, Any]:
    """Agent, tokenizer, template and prompts together, then the algorithm, which the agent file may bring. Returns what was found."""
    from molt.agents.preflight import preflight

    found = preflight(config)
    check_algorithm(config)
    return {
        "num_prompts": len(found.prompts),
        "prompts_digest": found.prompts.digest,
        "num_eval_prompts": None if found.eval_prompts is None else len(found.eval_prompts),
        "num_too_long": found.num_too_long,
    }


def check_algorithm(config: Config) -> None:
    """Look up estimator and loss. SettingError lists the known ones, or a setting that does nothing under the chosen one."""
    if version_of("torch") is None:
        return
    from molt.algo.estimators import get_estimator
    from molt.algo.loss import loss_names
    from molt.algo.rules import check_estimator

    if config.algo.loss.name not in loss_names():
        raise SettingError(f"algo.loss.name={config.algo.loss.name} is unknown; known are {', '.join(loss_names())}")
    chosen = get_estimator(config.algo.advantage.estimator)
    check_estimator(config.algo, name=chosen.name, uses=chosen.uses, needs=chosen.needs)
