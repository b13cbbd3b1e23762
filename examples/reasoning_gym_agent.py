"""One turn: a question of reasoning-gym with one right answer (prompts: tools/make_prompts.py), graded by plain comparison."""

from __future__ import annotations

import re

import molt.agents as agents

SYSTEM = "Answer with the number only."
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def final_answer(text: str) -> str:
    """What counts as the answer: the content of the last <answer>, else the last number, else the whole text."""
    marked = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if marked:
        return marked[-1].strip()
    numbers = NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else text.strip()


class QuestionEnv(agents.Env):
    """One question and one answer."""

    async def reset(self) -> agents.Observation:
        """The question, after one line that says how to answer."""
        return agents.Observation(messages=({"role": "system", "content": SYSTEM}, *self.prompt.messages))

    async def step(self, action: agents.Action) -> agents.Result:
        """1 for the right answer, else 0."""
        is_right = final_answer(action.text) == str(self.prompt.label)
        return agents.Result(terminated=True, truncated=False, reward=float(is_right), outcome=float(is_right))


class AgentRunner(agents.AgentRunner):
    """The agent that `--train.agent_path` names."""

    env = QuestionEnv
