"""An agent for tests: one token about a picture that is red or blue; an odd id is right for red, an even one for blue."""

from __future__ import annotations

import molt.agents as agents


class ColourEnv(agents.Env):
    """Only the picture tells what is right: the question is always the same."""

    async def step(self, action: agents.Action) -> agents.Result:
        """1 for a right id, else 0."""
        reward = float(int(action.token_ids[0]) % 2 == int(self.prompt.label))
        return agents.Result(terminated=True, truncated=False, reward=reward, outcome=reward)


class AgentRunner(agents.AgentRunner):
    """Exported."""

    env = ColourEnv
