"""Benchmarks: each prints ratios measured in one run on one machine, and keeps them in docs/evidence."""
