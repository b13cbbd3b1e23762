"""Routes of calls that vLLM preempted: the same experts as the same tokens have in one undisturbed pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from molt.config import Config
from tools.device.routes import agreement, measure


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_a_preempted_call_keeps_its_routes(tiny_moe: Path, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "actor": {"model_name_or_path": str(tiny_moe)},
            "data": {"max_len": 128},
            "vllm": {"engine": "vllm", "max_num_seqs": 16},
            "train": {"routing_replay": True},
        }
    )
    # 16 + 72 tokens are 3 blocks of 32: a cache of 8 blocks holds two of eight calls.
    known = {"config": config.model_dump_json(), "sizes": {"prompt": 16, "answer": 72}, "num_blocks": 8, "num_quiet": 2, "num_calls": 8}
    (tmp_path / "routes.json").write_text(json.dumps(known))
    found = await measure(tmp_path / "routes.json")
    assert found["quiet"]["num_preemptions"] == 0 and found["preempted"]["num_preemptions"] > 0
    for part in ("quiet", "preempted"):
        assert found[part]["worst_call"] == 1.0 and found[part]["num_missing"] == 0
        assert found[part]["num_tokens"] == found[part]["num_calls"] * (16 + 72 - 1)


def test_agreement_counts_experts_in_common_whatever_their_order() -> None:
    one = np.array([[[0, 1]], [[2, 3]]], np.int16)
    other = np.array([[[1, 0]], [[2, 5]]], np.int16)
    found = agreement([one], [other])
    # Token 0: both of 2, in another order; token 1: one of 2.
    assert found["mean"] == found["worst_call"] == 0.75 and found["same_tokens"] == 0.5
    assert agreement([np.full((1, 1, 2), -1, np.int16)], [one])["num_missing"] == 1
