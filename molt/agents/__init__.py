"""Agents: the programs that act, and the capture of what the policy sampled for them."""

from molt.agents.env import Action, AgentRunner, Env, Model, Observation, Result, StopReason, Tool, ToolCall

__all__ = ["Action", "AgentRunner", "Env", "Model", "Observation", "Result", "StopReason", "Tool", "ToolCall"]
