"""Parity: how far engine and trainer are apart on the same tokens, by kind of model and of engine."""
