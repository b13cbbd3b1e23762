"""Several turns: an arithmetic question of reasoning-gym with a calculator that is shown by three examples.

    python tools/make_prompts.py chain_sum prompts.jsonl --size 3000 \\
        --set min_terms=3 --set max_terms=3 --set min_digits=1 --set max_digits=2

SmolLM2-135M-Instruct at temperature 1 was right in 12 of 24 rollouts: it called the calculator in 18 of them, in 14 with the
right problem. Reinforcement has that much to gain. rollout.max_new_tokens=20 and data.max_len=512 are ample.
"""

from __future__ import annotations

from calculator_agent import CALL, MAX_CALLS, calculate
from reasoning_gym_agent import final_answer

import molt.agents as agents

SYSTEM = "Use the calculator."
QUESTION = "State the final answer to the following arithmetic problem: {} ="
EXAMPLES = (("12 + 30", "42"), ("7 - 25 + 4", "-14"), ("81 - 9", "72"))


def opening() -> tuple[agents.Message, ...]:
    """The system message and the examples."""
    messages: list[agents.Message] = [{"role": "system", "content": SYSTEM}]
    for problem, value in EXAMPLES:
        messages += [
            {"role": "user", "content": QUESTION.format(problem)},
            {"role": "assistant", "content": f"<calc>{problem}</calc>"},
            {"role": "user", "content": f"Result: {value}"},
            {"role": "assistant", "content": value},
        ]
    return tuple(messages)


class ToolEnv(agents.Env):
    """One question: calls of the calculator until an answer without a call."""

    num_calls = 0

    async def reset(self) -> agents.Observation:
        """How to use the tool, then the question."""
        return agents.Observation(messages=(*opening(), *self.prompt.messages))

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
