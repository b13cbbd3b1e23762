"""Several turns with a tool: the model may call <calc>37+58</calc> and must end with the sum."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

import molt.agents as agents

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_CALLS = 3
MAX_LENGTH = 64
"""Characters of an expression."""


def calculate(expression: str) -> str:
    """Value of whole numbers joined by + - *; what is wrong, in words, otherwise."""
    if len(expression) > MAX_LENGTH:
        return "error: too long"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError):
        return "error: not a sum"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("unknown part of an expression")


class CalculatorEnv(agents.Env):
    """One sum: calls of the tool until an answer without a call."""

    num_calls = 0

    async def step(self, action: agents.Action) -> agents.Result:
        """Answer a call, or grade the final answer: 1 for the right number, else 0."""
        call = CALL.search(action.text)
        if call and self.num_calls < MAX_CALLS:
            self.num_calls += 1
            observation = agents.Observation.tool(calculate(call.group(1)))
            return agents.Result(terminated=False, truncated=False, observation=observation)
        is_right = action.text.strip() == str(self.prompt.label)
        return agents.Result(
            terminated=True, truncated=False, reward=float(is_right), outcome=float(is_right), metrics={"num_calls": float(self.num_calls)}
        )


class AgentRunner(agents.AgentRunner):
    """The agent that `--train.agent_path` names."""

    env = CalculatorEnv
