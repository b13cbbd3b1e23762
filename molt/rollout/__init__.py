"""Engines, the workers that run agents on them, and the pool that keeps groups in flight."""
