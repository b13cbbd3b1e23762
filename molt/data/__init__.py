"""Prompts and conversations: what goes into a run. Imports neither torch nor transformers."""
