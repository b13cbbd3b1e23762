"""An agent for tests: the picture of the prompt, an answer, the picture upside down, an answer; paid by what random ids happen to be."""

from __future__ import annotations

import molt.agents as agents


class LookingEnv(agents.Env):
    """Two looks."""

    num_steps = 0
    num_odd = 0

    async def step(self, action: agents.Action) -> agents.Result:
        """A share of odd ids is a reward that differs within a group."""
        self.num_steps += 1
        self.num_odd += int((action.token_ids % 2).sum())
        if self.num_steps == 2:
            return agents.Result(terminated=True, truncated=False, reward=self.num_odd / 12, outcome=float(self.num_odd > 6))
        turned = agents.Image.of(self.prompt.images[0].decoded().rotate(180))
        return agents.Result(terminated=False, truncated=False, observation=agents.Observation.user("Now: ", turned, "How many?"))


class AgentRunner(agents.AgentRunner):
    """Exported."""

    env = LookingEnv
