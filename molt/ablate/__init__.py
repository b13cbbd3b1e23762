"""Algorithms tried again on a recorded run: which tokens would have trained, how, and how sure that is."""
