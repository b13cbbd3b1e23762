"""One turn: the last whole number of the answer is compared with the label; plain Python, for machines without graders."""

from __future__ import annotations

import re

import molt.agents as agents

NUMBER = re.compile(r"-?\d+")


class NumberEnv(agents.Env):
    """One question and one answer."""

    async def step(self, action: agents.Action) -> agents.Result:
        """1 for the right number, else 0."""
        found = NUMBER.findall(action.text.replace(",", ""))
        is_right = bool(found) and found[-1] == str(self.prompt.label)
        return agents.Result(terminated=True, truncated=False, reward=float(is_right), outcome=float(is_right))


class AgentRunner(agents.AgentRunner):
    """The agent that --train.agent_path names."""

    env = NumberEnv
