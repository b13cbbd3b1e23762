"""Parity: what is measured, what is refused, and the verb on tiny models with the embedded engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from molt.cli.app import run
from molt.data.tiny_vision import make_pictures, make_vision_model
from molt.errors import SettingError
from molt.parity.measure import measure_gap
from molt.parity.sides import Sample, batches
from molt.parity.variants import Variant, choose, limits
from tests.learn.tiny import make_moe


def test_gap_of_known_differences() -> None:
    engine = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)
    gap = measure_gap(engine, engine + np.array([0.0, 0.5, -0.5, 0.0], np.float32))
    # |d| = 0, .5, .5, 0; k3 = (0 + (e^.5 - 1.5) + (e^-.5 - .5) + 0) / 4
    assert gap.num_tokens == 4 and gap.mean == 0.25 and gap.max == 0.5 and gap.equal_share == 0.5
    assert gap.k3 == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 4)
    assert gap.ratios["0.5"] == 1.0


def test_one_log_prob_that_is_not_a_number_is_above_every_limit() -> None:
    gap = measure_gap(np.array([-1.0, np.nan], np.float32), np.array([-1.0, -1.0], np.float32))
    assert not gap.mean <= 1e9


def test_variants_follow_the_model_unless_asked_for() -> None:
    assert choose([], is_moe=False, is_cuda=False, engine="embedded") == [Variant.DENSE]
    assert choose([], is_moe=True, is_cuda=True, engine="vllm") == [Variant.MOE, Variant.MOE_R3]
    assert choose(["fp8", "moe+r3"], is_moe=True, is_cuda=True, engine="vllm") == [Variant.FP8, Variant.MOE_R3]


@pytest.mark.parametrize(
    ("asked", "is_moe", "is_cuda", "engine", "why"),
    [
        (["fp8"], False, False, "vllm", "no GPU"),
        (["fp8"], False, True, "embedded", "vllm.engine=embedded"),
        (["moe"], False, True, "vllm", "no experts"),
        (["dense"], True, True, "vllm", "mixture of experts"),
        (["int4"], False, True, "vllm", "known are dense, moe"),
    ],
)
def test_a_variant_that_cannot_be_is_refused(asked: list[str], is_moe: bool, is_cuda: bool, engine: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        choose(asked, is_moe=is_moe, is_cuda=is_cuda, engine=engine)


def test_each_variant_has_a_limit_of_its_own_and_a_flag_over_it() -> None:
    found = limits("bfloat16", ["moe+r3=0.005"], 0.8)
    assert (found[Variant.MOE].mean_gap, found[Variant.MOE_R3].mean_gap, found[Variant.FP8].mean_gap) == (0.1, 0.005, 0.2)
    assert found[Variant.MOE].agreement == 0.8 and found[Variant.DENSE].agreement is None
    for word in ("moe", "sparse=1", "moe=much"):
        with pytest.raises(SettingError, match="VARIANT=NATS"):
            limits("float32", [word], 0.9)


def test_samples_are_packed_up_to_a_number_of_tokens() -> None:
    def one(length: int) -> Sample:
        return Sample(token_ids=np.zeros(length, np.int32), num_prompt=1, logprobs=np.zeros(length - 1, np.float32), routes=None)

    assert [[len(item.token_ids) for item in batch] for batch in batches([one(n) for n in (4, 5, 3, 20, 2)], 10)] == [
        [4, 5],
        [3],
        [20],
        [2],
    ]


def parity(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    settings = {
        "actor.model_name_or_path": model,
        "actor.implementation": "hf",
        "vllm.engine": "embedded",
        "rollout.max_new_tokens": 12,
        "data.max_len": 96,
    }
    code = run(["parity", *(f"--{name}={value}" for name, value in settings.items()), "--samples", "2", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_dense_model_is_within_its_limit_and_past_a_smaller_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = parity(model, capsys)
    (row,) = found["rows"]
    assert code == 0 and found["is_within"] and row["variant"] == "dense"
    assert row["num_tokens"] == 8 * 2 * 12 and row["mean"] < 1e-5 and row["agreement_min"] is None
    code, found = parity(model, capsys, "--limits", "dense=1e-12")
    assert code == 1 and not found["rows"][0]["is_within"]


def test_a_mixture_is_compared_without_and_with_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = parity(make_moe(tmp_path), capsys)
    live, replayed = found["rows"]
    assert code == 0 and (live["variant"], replayed["variant"]) == ("moe", "moe+r3")
    # In float32 both sides choose alike, so replay changes nothing.
    assert live["agreement_by_layer"] == replayed["agreement_by_layer"] == [1.0, 1.0]
    assert max(live["mean"], replayed["mean"]) < 1e-5


def test_fp8_on_this_machine_is_refused_before_anything_starts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = parity(model, capsys, "--variants", "fp8")
    assert code == 2 and "fp8" in found["error"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = parity(tmp_path, capsys)
    assert code == 2 and "config.json cannot be read" in found["error"]


def test_pictures_are_among_the_prompts_of_a_model_that_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_vision_model(tmp_path / "model", num_tiles=2, spread=0.1)
    code, found = parity(tmp_path / "model", capsys, "--data.max_len", "160")
    (row,) = found["rows"]
    # 16 texts and pictures of four sizes, two of them shown with another one; a tile more or less leaves room or does not
    assert code == 0 and found["num_prompts"] == 20 and found["num_images"] == 6 and row["mean"] < 1e-5
    prompts = make_pictures(tmp_path / "shapes", num_prompts=3)
    code, found = parity(tmp_path / "model", capsys, "--data.max_len", "160", "--prompts", str(prompts))
    assert code == 0 and (found["num_prompts"], found["num_images"]) == (3, 3)
