"""Checkpoints: resume is bitwise, a crash leaves the previous one usable, the newest complete one is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from molt.errors import DataError, MoltError
from molt.learn import checkpoint
from molt.learn.checkpoint import Position, incomplete, keep_newest, load, newest, save
from tests.learn.tiny import make_config, make_moe, make_plan, make_rank, make_rows

POSITION = Position(step=2, policy_version=2, cursor=11, lsn_end=17, weights_digest="d", num_updates={"actor": 2})


def test_two_steps_and_two_after_resume_equal_four_straight(model: Path, tmp_path: Path) -> None:
    rows = make_rows(6)
    config = make_config(model, actor={"schedule": "cosine", "warmup_steps": 2})
    straight, first, second = (make_rank(config, rows) for _ in range(3))
    expected = [straight.train(make_plan(rows, step=step)) for step in range(4)]
    for step in range(2):
        first.train(make_plan(rows, step=step))
    folder = save(tmp_path, {"actor": first.policy}, POSITION)
    drawn = torch.rand(3)
    assert load(folder, {"actor": second.policy}) == POSITION
    assert torch.equal(torch.rand(3), drawn)  # the random state came back
    resumed = [second.train(make_plan(rows, step=step)) for step in (2, 3)]
    assert [r.loss_digest for r in resumed] == [r.loss_digest for r in expected[2:]]
    assert [r.learning_rate for r in resumed] == [r.learning_rate for r in expected[2:]]
    assert resumed[-1].weights_digest == expected[-1].weights_digest
    a, b = straight.policy.optimizer.state_dict()["state"], second.policy.optimizer.state_dict()["state"]
    assert all(torch.equal(a[k][m].to_local(), b[k][m].to_local()) for k in a for m in ("exp_avg", "exp_avg_sq"))


def test_checkpoint_before_the_first_step_resumes_bitwise(model: Path, tmp_path: Path) -> None:
    rows = make_rows(4)
    straight, saved, loaded = (make_rank(make_config(model), rows) for _ in range(3))
    folder = save(tmp_path, {"actor": saved.policy}, replace(POSITION, step=0, num_updates={"actor": 0}))
    load(folder, {"actor": loaded.policy})
    expected = straight.train(make_plan(rows)).weights_digest
    assert loaded.train(make_plan(rows)).weights_digest == expected
    assert saved.train(make_plan(rows)).weights_digest == expected  # saving does not count as a step


def test_incomplete_checkpoint_is_passed_over_whatever_part_is_missing(model: Path, tmp_path: Path) -> None:
    rank = make_rank(make_config(model), make_rows(2))
    old = save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=10, num_updates={"actor": 0}))
    new = save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=20, num_updates={"actor": 0}))
    assert newest(tmp_path) == (new, [])
    for name in [*json.loads((new / "complete.json").read_text())["files"], "complete.json"]:
        broken = tmp_path / "copy" / new.name
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(new, broken)
        shutil.copytree(old, broken.parent / old.name)
        (broken / name).unlink()
        found, passed_over = newest(tmp_path / "copy")
        assert found == broken.parent / old.name, name
        assert passed_over == [f"checkpoint step-00000020 is passed over: {name} is missing"]
        with pytest.raises(DataError, match=r"not complete.*missing"):
            load(broken, {"actor": rank.policy})


def test_truncated_file_makes_a_checkpoint_incomplete(model: Path, tmp_path: Path) -> None:
    rank = make_rank(make_config(model), make_rows(2))
    folder = save(tmp_path, {"actor": rank.policy}, replace(POSITION, num_updates={"actor": 0}))
    largest = max((f for f in folder.iterdir() if f.suffix == ".distcp"), key=lambda f: f.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size - 1)
    assert "bytes" in (incomplete(folder) or "")


def test_one_flipped_bit_anywhere_has_the_checkpoint_before_taken(model: Path, tmp_path: Path) -> None:
    rows = make_rows(2)
    rank = make_rank(make_config(model), rows)
    rank.train(make_plan(rows))
    old, new = (save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=step, num_updates={"actor": 1})) for step in (1, 2))
    for file in sorted(file for file in new.rglob("*") if file.is_file()):
        whole = file.read_bytes()
        for part in range(8):
            bits = bytearray(whole)
            bits[len(whole) * part // 8] ^= 4
            file.write_bytes(bytes(bits))
            assert newest(tmp_path)[0] == old, (file.name, part)
        file.write_bytes(whole)
        assert newest(tmp_path) == (new, [])


def test_crash_while_saving_leaves_the_previous_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(make_config(model), make_rows(2))
    old = save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=1, num_updates={"actor": 0}))

    def crash(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", crash)
        with pytest.raises(MoltError, match="no space"):
            save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=2, num_updates={"actor": 0}))
    assert newest(tmp_path) == (old, [])
    keep_newest(tmp_path, 2, old)
    assert [f.name for f in tmp_path.iterdir()] == [old.name]


def test_disk_that_takes_no_checkpoint_is_told_with_the_way_out(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = {"actor": make_rank(make_config(model), make_rows(2)).policy}
    (tmp_path / "taken").write_text("")
    with pytest.raises(MoltError, match=r"checkpoint step-00000002 cannot be written to .*taken \(NotADirectoryError.*free space or mend"):
        save(tmp_path / "taken", policies, POSITION)

    def full(*arguments: object, **named: object) -> None:
        raise CheckpointException("save", {0: _wrap_exception(OSError(28, "No space left on device"))})

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(MoltError, match=r"\(OSError: .*No space left on device\); those before it are whole"):
        save(tmp_path, policies, POSITION)


def test_only_the_newest_are_kept(model: Path, tmp_path: Path) -> None:
    rank = make_rank(make_config(model), make_rows(2))
    for step in (1, 2, 3):
        saved = save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=step, num_updates={"actor": 0}))
    keep_newest(tmp_path, 2, saved)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("how", ["a bit", "the marker"])
def test_checkpoint_that_was_passed_over_does_not_take_the_place_of_the_one_saved_next(model: Path, tmp_path: Path, how: str) -> None:
    rank = make_rank(make_config(model), make_rows(2))
    ten, twenty = (save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=step, num_updates={"actor": 0})) for step in (10, 20))
    if how == "a bit":
        file = next(twenty.glob("*.distcp"))
        bits = bytearray(file.read_bytes())
        bits[len(bits) // 2] ^= 4
        file.write_bytes(bytes(bits))
    else:
        (twenty / "complete.json").unlink()
    assert newest(tmp_path)[0] == ten
    twelve = save(tmp_path, {"actor": rank.policy}, replace(POSITION, step=12, num_updates={"actor": 0}))
    keep_newest(tmp_path, 1, twelve)
    assert newest(tmp_path) == (twelve, []) and [f.name for f in tmp_path.iterdir()] == [twelve.name]


def test_checkpoint_of_another_class_of_model_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    dense, moe = make_rank(make_config(model), make_rows(2)), make_rank(make_config(make_moe(tmp_path / "moe")), make_rows(2))
    folder = save(tmp_path, {"actor": dense.policy}, replace(POSITION, num_updates={"actor": 0}))
    before = moe.policy.full_tensors()
    with pytest.raises(DataError, match=r"holds no lm\.model\.layers\.0\.mlp\.experts\..*another class of model wrote it"):
        load(folder, {"actor": moe.policy})
    assert all(torch.equal(before[name], tensor) for name, tensor in moe.policy.full_tensors().items())


def test_checkpoint_of_a_run_that_learned_less_is_refused_with_the_setting(model: Path, tmp_path: Path) -> None:
    rows, moe = make_rows(2), make_moe(tmp_path / "moe")
    frozen, free = make_rank(make_config(moe, actor={"freeze_moe_router": True}), rows), make_rank(make_config(moe), rows)
    frozen.train(make_plan(rows))
    folder = save(tmp_path / "checkpoints", {"actor": frozen.policy}, replace(POSITION, num_updates={"actor": 1}))
    with pytest.raises(DataError, match=r"mlp\.gate\.weight.* of actor, which did not learn then; set actor\.freeze_moe_router"):
        load(folder, {"actor": free.policy})
    with pytest.raises(DataError, match=r"holds no critic: another estimator wrote it; set algo\.advantage\.estimator"):
        load(folder, {"actor": frozen.policy, "critic": frozen.policy})


def test_settings_of_the_optimizer_are_those_of_the_attempt_that_loads(model: Path, tmp_path: Path) -> None:
    rows = make_rows(2)
    before, now = (
        make_rank(make_config(model), rows),
        make_rank(make_config(model, actor={"weight_decay": 0.1, "adam_betas": (0.8, 0.9)}), rows),
    )
    before.train(make_plan(rows))
    load(save(tmp_path, {"actor": before.policy}, replace(POSITION, num_updates={"actor": 1})), {"actor": now.policy})
    now.train(make_plan(rows, step=1))
    groups = now.policy.optimizer.param_groups
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in groups] == [(1e-2, (0.8, 0.9), 0.1)]
