"""One or two looks at a picture: how many circles are in it; a wrong first answer is asked again beside the picture enlarged."""

from __future__ import annotations

import re

import molt.agents as agents

NUMBER = re.compile(r"\d+")
SECOND_LOOK = 0.5
"""Reward of a right answer to the second question."""


def is_right(text: str, label: str) -> bool:
    """Whether the last whole number is the label."""
    found = NUMBER.findall(text)
    return bool(found) and found[-1] == label


class PictureEnv(agents.Env):
    """A picture, a question, and perhaps a second look."""

    is_second = False

    async def step(self, action: agents.Action) -> agents.Result:
        """1 for the right number at once, half of it at the second look, else 0."""
        right = is_right(action.text, str(self.prompt.label))
        if right or self.is_second:
            reward = float(right) * (SECOND_LOOK if self.is_second else 1.0)
            return agents.Result(terminated=True, truncated=False, reward=reward, outcome=float(right))
        self.is_second = True
        again = agents.Observation.user("Look again, here it is larger: ", self.enlarged(), "How many circles?")
        return agents.Result(terminated=False, truncated=False, observation=again)

    def enlarged(self) -> agents.Image:
        """The picture at twice its size."""
        picture = self.prompt.images[0].decoded()
        return agents.Image.of(picture.resize((2 * picture.width, 2 * picture.height)))


class AgentRunner(agents.AgentRunner):
    """The agent that --train.agent_path names."""

    env = PictureEnv
