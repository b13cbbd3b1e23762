"""Batches and settings for the tests of the algorithms."""

from __future__ import annotations

import torch

from molt.algo.batch import RaggedBatch
from molt.config import AlgoSettings

NAN = float("nan")


def batch_of(rollouts, **columns) -> RaggedBatch:
    """A batch from the reference's rollouts: dicts with group, reward (None = unscorable) and segments."""
    groups = {}
    lengths = [n for r in rollouts for n in r["segments"]]
    fields = {
        "lengths_S": torch.tensor(lengths, dtype=torch.int64),
        "n_tokens_S": torch.tensor([n + 3 for n in lengths], dtype=torch.int64),
        "rollout_S": torch.tensor([i for i, r in enumerate(rollouts) for _ in r["segments"]], dtype=torch.int64),
        "group_R": torch.tensor([groups.setdefault(r["group"], len(groups)) for r in rollouts], dtype=torch.int64),
        "reward_R": torch.tensor([NAN if r["reward"] is None else r["reward"] for r in rollouts], dtype=torch.float32),
        "outcome_R": torch.tensor([NAN if r.get("outcome") is None else r["outcome"] for r in rollouts], dtype=torch.float32),
        "is_truncated_R": torch.tensor([r.get("truncated", False) for r in rollouts], dtype=torch.bool),
    }
    return RaggedBatch(**(fields | columns))


def group(rewards, *, name="a", length=1):
    """One group whose rollouts have one segment of the given length."""
    return [{"group": name, "reward": reward, "segments": [length]} for reward in rewards]


def algo(**sections) -> AlgoSettings:
    """config.algo with some keys set: algo(advantage={"gamma": 0.5})."""
    return AlgoSettings.model_validate(sections)
