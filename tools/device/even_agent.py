"""One long answer of any text: the reward is the share of sampled ids that are even, so that a random model has something to learn."""

from __future__ import annotations

import molt.agents as agents


class EvenEnv(agents.Env):
    """One question; the answer is counted, not read."""

    async def step(self, action: agents.Action) -> agents.Result:
        """Share of even ids."""
        reward = float((action.token_ids % 2 == 0).mean())
        return agents.Result(terminated=True, truncated=False, reward=reward, outcome=reward)


class AgentRunner(agents.AgentRunner):
    """The agent that --train.agent_path names."""

    env = EvenEnv
