"""One turn: a mathematical question, graded by math-verify in a process of its own."""

from __future__ import annotations

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

import molt.agents as agents
from molt.agents.verifier import Verifier

TIMEOUT_S = 10.0
"""Longest grading of one answer."""
NUM_WORKERS = 2


def gold_answer(label: str) -> str:
    """The answer of a label: what follows #### (GSM8K), or the whole label."""
    return label.rsplit("####", 1)[-1].strip()


def grade(text: str, label: str) -> float | None:
    """1.0 when the answer in text equals that of the label, else 0.0; None when the label itself cannot be read."""
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # No timeouts by signal: this process is killed when time is up.
    gold = parse(f"${gold_answer(label)}$", extraction_config=targets, parsing_timeout=None)
    if not gold:
        return None
    answer = parse(text, extraction_config=targets, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


class MathEnv(agents.Env):
    """One question and one answer."""

    def __init__(self, prompt: agents.Prompt, verifier: Verifier) -> None:
        super().__init__(prompt)
        self.verifier = verifier

    async def step(self, action: agents.Action) -> agents.Result:
        """Grade the answer; what the grader cannot decide is unscorable, not wrong."""
        verdict = await self.verifier.verify(action.text, str(self.prompt.label))
        unscorable = verdict.unscorable or ("the label cannot be read" if verdict.value is None else None)
        return agents.Result(
            terminated=True,
            truncated=False,
            reward=verdict.value,
            outcome=verdict.value,
            unscorable=unscorable,
            metrics={"is_unscorable": float(unscorable is not None)},
        )


class AgentRunner(agents.AgentRunner):
    """The agent that `--train.agent_path` names."""

    def __init__(self) -> None:
        self.verifier = Verifier(grade, num_workers=NUM_WORKERS, timeout_s=TIMEOUT_S)

    async def start(self) -> None:
        """Make room for the graders."""
        await self.verifier.start()

    async def close(self) -> None:
        """End the graders."""
        await self.verifier.close()

    def make_env(self, prompt: agents.Prompt) -> MathEnv:
        """One question with the graders of this worker."""
        return MathEnv(prompt, self.verifier)
