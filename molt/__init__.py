"""Molt: agentic reinforcement learning whose trajectory log is the transport."""

__version__ = "0.1.0"
