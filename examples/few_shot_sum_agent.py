"""One turn after three worked examples: the last whole number of the answer is compared with the label; plain Python, no graders."""

from __future__ import annotations

import re

import molt.agents as agents

NUMBER = re.compile(r"-?\d+")
SYSTEM = "Answer with the number only."
EXAMPLES = (("12 + 30 =", "42"), ("9 - 4 =", "5"), ("7 + 8 =", "15"))


def opening(question: str) -> tuple[agents.Message, ...]:
    """System line, examples in the words of the question, the question itself."""
    asks = question.rpartition(":")[0] + ": " if ":" in question else ""
    shown: list[agents.Message] = [{"role": "system", "content": SYSTEM}]
    for sum_, answer in EXAMPLES:
        shown += [{"role": "user", "content": f"{asks}{sum_}"}, {"role": "assistant", "content": answer}]
    return (*shown, {"role": "user", "content": question})


def is_right(text: str, label: str) -> bool:
    """Whether the last whole number is the label."""
    found = NUMBER.findall(text.replace(",", ""))
    return bool(found) and found[-1] == label


class NumberEnv(agents.Env):
    """One question and one answer."""

    async def reset(self) -> agents.Observation:
        """Examples, then the question."""
        return agents.Observation(messages=opening(str(self.prompt.messages[-1]["content"])))

    async def step(self, action: agents.Action) -> agents.Result:
        """1 for the right number, else 0."""
        reward = float(is_right(action.text, str(self.prompt.label)))
        return agents.Result(terminated=True, truncated=False, reward=reward, outcome=reward)


class AgentRunner(agents.AgentRunner):
    """The agent that --train.agent_path names."""

    env = NumberEnv
