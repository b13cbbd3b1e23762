"""The verb parity with vLLM as the engine: a mixture of experts without and with replay, and a model that drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from molt.cli.app import run
from tools.device.models import make_moe_model, make_mtp_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def parity(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    settings = {
        "actor.model_name_or_path": model,
        "actor.implementation": "hf",
        "vllm.engine": "vllm",
        "rollout.max_new_tokens": 32,
        "data.max_len": 128,
    }
    code = run(["parity", *(f"--{name}={value}" for name, value in settings.items()), *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_mixture_agrees_with_the_trainer_token_by_token_and_expert_by_expert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 128, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_size": 64, "vocab_size": 300}
    code, found = parity(make_moe_model(tmp_path / "moe", dtype="float32", **sizes), capsys)
    live, replayed = found["rows"]
    assert code == 0 and found["engine"] == "vllm"
    assert live["num_tokens"] == replayed["num_tokens"] == 8 * 4 * 32
    assert max(live["mean"], replayed["mean"]) < 1e-5 and min(live["agreement_by_layer"]) > 0.999


def test_drafts_do_not_show_in_log_probs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_mtp_model(tmp_path / "mtp", hidden_size=128, num_layers=2, vocab_size=300, dtype="float32")
    code, found = parity(folder, capsys, "--vllm.num_speculative_tokens=2")
    assert code == 0 and found["rows"][0]["mean"] < 1e-5
