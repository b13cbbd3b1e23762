"""Agents: the programs that act, and the capture of what the policy sampled for them."""

from molt.agents.callforms import ToolCall
from molt.agents.env import Action, AgentRunner, Env, Model, Observation, Result, StopReason, Tool
from molt.data.images import Image
from molt.data.messages import Message
from molt.data.prompts import Prompt

__all__ = ["Action", "AgentRunner", "Env", "Image", "Message", "Model", "Observation", "Prompt", "Result", "StopReason", "Tool", "ToolCall"]
