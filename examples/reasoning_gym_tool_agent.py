"""Several turns: an arithmetic question of reasoning-gym with a calculator that is shown by one example."""

from __future__ import annotations

from calculator_agent import CALL, MAX_CALLS, calculate
from reasoning_gym_agent import final_answer

import molt.agents as agents

SYSTEM = (
    "You have a calculator. Write the problem as <calc>12 + 30</calc> and stop; you then get the result. "
    "When you have the result, answer with that number only."
)
EXAMPLE: tuple[agents.Message, ...] = (
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 12 + 30 ="},
    {"role": "assistant", "content": "<calc>12 + 30</calc>"},
    {"role": "user", "content": "Result: 42"},
    {"role": "assistant", "content": "42"},
)


class ToolEnv(agents.Env):
    """One question: calls of the calculator until an answer without a call."""

    num_calls = 0

    async def reset(self) -> agents.Observation:
        """How to use the tool, one example, the question."""
        return agents.Observation(messages=({"role": "system", "content": SYSTEM}, *EXAMPLE, *self.prompt.messages))

    async def step(self, action: agents.Action) -> agents.Result:
        """Answer a call, or grade the final answer: 1 for the right number, else 0."""
        call = CALL.search(action.text)
        if call and self.num_calls < MAX_CALLS:
            self.num_calls += 1
            observation = agents.Observation.user(f"Result: {calculate(call.group(1))}")
            return agents.Result(terminated=False, truncated=False, observation=observation)
        is_right = final_answer(action.text) == str(self.prompt.label)
        return agents.Result(
            terminated=True, truncated=False, reward=float(is_right), outcome=float(is_right), metrics={"num_calls": float(self.num_calls)}
        )


class AgentRunner(agents.AgentRunner):
    """The agent that `--train.agent_path` names."""

    env = ToolEnv
