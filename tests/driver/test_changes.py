"""What a resumed attempt does otherwise: which settings, in words and as an event, and where replay starts other ranks for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from molt.admission.plan import laid_out, plan_digest, plan_step, plan_to_json
from molt.cli.programs import load_program
from molt.config import Config
from molt.driver.changes import Changes, changes_since, check_checkpoint, provenance
from molt.errors import DataError, LogError
from molt.learn.checkpoint import Position
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Event, event
from molt.log.writer import LogWriter
from tests.learn.tiny import make_plan, make_rows


def started(resumed_from_step: int | None = None, *, num_steps: int = 8, made: dict[str, Any] | None = None, **rooms: Any) -> Event:
    """An attempt under the settings of those rooms. made: what was otherwise than it is here and now."""
    config = Config.model_validate(rooms)
    known = provenance(config) | (made or {})
    return event(
        "attempt_started", config=config.model_dump_json(), config_digest="", code_digest=known["code_digest"],
        agent_digest=known["agent_digest"], pipeline=known["pipeline"],
        packages=json.dumps(known["packages"]), hardware=json.dumps(known["hardware"]), seed=0,
        resumed_from_step=resumed_from_step, model_digest="m", num_steps=num_steps, pid=1, host="h",
    )  # fmt: skip


def steps(first: int, end: int) -> list[Event]:
    """Steps planned and trained, without a batch."""
    found = []
    for step in range(first, end):
        plan = plan_step([], step=step, policy_version=step, seed=0, num_ranks=1, micro_batch_tokens=64, cursor=0)
        text = plan_to_json(plan)
        found.append(
            event(
                "batch_planned",
                step=step,
                policy_version=step,
                plan=text,
                plan_digest=plan_digest(text),
                groups=[],
                num_segments=0,
                num_rollouts=0,
                n_sampled=0,
                seed=0,
                cursor=0,
            )
        )
        found.append(
            event(
                "step_trained",
                step=step,
                policy_version=step,
                loss=0.0,
                grad_norm=0.0,
                learning_rate=0.0,
                n_sampled=0,
                n_kept=0,
                batch_digest="b",
                loss_digest="l",
                metrics="{}",
                train_s=0.0,
                log_s=0.0,
                wait_s=0.0,
            )
        )
    return found


def write(tmp_path: Path, *attempts: list[Event]) -> LogReader:
    """A log of attempts one after another."""
    for number, events in enumerate(attempts, start=1):
        with LogWriter.open(tmp_path / "run", run="run", attempt=number, store="process") as writer:
            Producer(writer, f"driver-{number}").append_sync(events=events)
    return LogReader.open(tmp_path / "run")


def changes(tmp_path: Path, *, num_steps: int = 8, now: dict[str, Any], **then: Any) -> Changes:
    """What differs between an attempt in the log and settings now."""
    found = changes_since(write(tmp_path, [started(**then)]), Config.model_validate(now), num_steps=num_steps)
    assert found is not None
    return found


def test_another_layout_is_told_with_its_values_before_and_now(tmp_path: Path):
    found = changes(tmp_path, now={"fsdp": {"num_ranks": 2}})
    assert (found.changed, found.is_exact) == ({"fsdp.num_ranks": (1, 2)}, False)
    line = found.line(from_step=4, num_replanned=3)
    assert line.startswith("goes on from step 4 with fsdp.num_ranks 1 -> 2; 3 planned batches are cut anew; steps trained again are not")
    assert found.told(from_step=4, num_replanned=3).body == {
        "from_step": 4,
        "changed": '{"fsdp.num_ranks": [1, 2]}',
        "is_exact": False,
        "num_replanned": 3,
    }


def test_settings_that_no_step_depends_on_leave_steps_exact(tmp_path: Path):
    found = changes(tmp_path, num_steps=12, now={"train": {"num_steps": 12}, "rollout": {"num_workers": 2}})
    assert (set(found.changed), found.is_exact) == ({"train.num_steps", "rollout.num_workers"}, True)
    assert "bit for bit" not in found.line(from_step=0, num_replanned=0)


def test_another_length_of_a_falling_schedule_changes_the_numbers(tmp_path: Path):
    actor = {"schedule": "linear"}
    found = changes(tmp_path, num_steps=12, now={"actor": actor}, actor=actor)
    assert not found.is_exact
    # the settings are the same: the data grew
    assert found.is_worth_telling(num_replanned=0) and found.changed == {"num_steps": (8, 12)}


def test_attempt_under_the_same_settings_has_nothing_to_tell(tmp_path: Path):
    found = changes(tmp_path, now={})
    assert not found.is_worth_telling(num_replanned=0) and found.is_worth_telling(num_replanned=1)


@pytest.mark.parametrize(
    ("part", "before", "name", "is_exact"),
    [
        ("code_digest", "c0", "code_digest", False),
        ("agent_digest", "a0", "agent_digest", True),  # an agent makes rollouts, not what steps make of them
        ("pipeline", "/copies/my_rl.py", "pipeline", True),  # what it holds is in code_digest
        ("packages", {"torch": "2.0.0"}, "packages.torch", False),
        ("packages", {"ray": "1.0.0"}, "packages.ray", True),
        ("packages", {"apex": "1"}, "packages.apex", True),  # gone since
        ("hardware", {"cores": 1000}, "hardware.cores", False),
        ("hardware", {"gpus": ["NVIDIA A100"]}, "hardware.gpus", False),
        ("hardware", {"environment": {"OMP_NUM_THREADS": "1000"}}, "environment.OMP_NUM_THREADS", False),
        ("hardware", {"memory_gib": 1.5}, None, True),
    ],
)
def test_what_a_run_is_made_of_is_told_and_counts_where_numbers_depend_on_it(
    tmp_path: Path, part: str, before: Any, name: str | None, is_exact: bool
):
    known = provenance(Config())[part]
    found = changes(tmp_path, now={}, made={part: known | before if isinstance(before, dict) else before})
    assert found.is_exact is is_exact
    assert [changed for changed in found.changed if changed == name or name is None] == ([] if name is None else [name])


def test_smaller_micro_batches_cut_planned_batches_anew(tmp_path: Path):
    found = changes(tmp_path, now={"train": {"micro_batch_tokens": 1024}})
    assert found.is_exact  # what is cut as before comes out as before
    assert not found.told(from_step=0, num_replanned=1).body["is_exact"]


def test_plan_laid_out_for_other_shards_keeps_its_batch(tmp_path: Path):
    plan = make_plan(make_rows(6), step=3, num_ranks=1, micro_batch_tokens=32)
    wide = laid_out(plan, num_ranks=2, micro_batch_tokens=32)
    assert len(wide.micro_batches) == 2 and wide != plan
    assert sorted(place for rank in wide.micro_batches for batch in rank for place in batch) == list(range(6))
    assert (wide.segments, wide.n_sampled, wide.seed, wide.cursor) == (plan.segments, plan.n_sampled, plan.seed, plan.cursor)
    assert laid_out(wide, num_ranks=1, micro_batch_tokens=32) == plan


def test_replay_takes_each_step_under_the_settings_that_made_it(tmp_path: Path):
    """One rank makes four steps; two go on from step 2 and end after it, so that the old step 3 is void; a third attempt is alike."""
    wide = {"fsdp": {"num_ranks": 2}}
    reader = write(tmp_path, [started(), *steps(0, 4)], [started(2, **wide), *steps(2, 3)])
    record = load_program("replay").read_record(reader)
    assert [[plan.step for plan, _ in span.steps] for span in record["spans"]] == [[0, 1], [2]]
    assert [span.config.fsdp.num_ranks for span in record["spans"]] == [1, 2]
    reader = write(tmp_path / "again", [started(), *steps(0, 4)], [started(2, **wide), *steps(2, 3)], [started(2, **wide), *steps(2, 5)])
    record = load_program("replay").read_record(reader)
    assert [[plan.step for plan, _ in span.steps] for span in record["spans"]] == [[0, 1], [2, 3, 4]]
    assert [[plan.step for plan, _ in span.steps] for span in load_program("replay").first_steps(record["spans"], 3)] == [[0, 1], [2]]


def test_attempts_that_changed_nothing_replay_on_the_same_ranks(tmp_path: Path):
    reader = write(tmp_path, [started(), *steps(0, 3)], [started(2), *steps(2, 4)])
    record = load_program("replay").read_record(reader)
    assert [[plan.step for plan, _ in span.steps] for span in record["spans"]] == [[0, 1, 2, 3]]
    assert len(record["plans"]) == 4


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """By what the step before it made, or by the fact that it was saved; where the log says neither, it is taken."""
    made = [*steps(0, 3), event("checkpoint_saved", step=3, policy_version=3, path="p", weights_digest="w3", cursor=0, lsn_end=0)]
    made[1] = replace(made[1], body=made[1].body | {"weights_digest": "w1"})
    reader = write(tmp_path, [started(), *made])
    place = {"policy_version": 0, "cursor": 0, "lsn_end": 0, "num_updates": {"actor": 1}}
    for step, digest in ((0, "m"), (1, "w1"), (2, "any"), (3, "w3")):
        check_checkpoint(reader, Path("step-x"), Position(step=step, weights_digest=digest, **place))
    for step in (0, 1, 3):
        with pytest.raises(
            DataError, match=rf"checkpoint step-x holds weights other, those after {step} steps of this run are \w+: another"
        ):
            check_checkpoint(reader, Path("step-x"), Position(step=step, weights_digest="other", **place))
    with pytest.raises(LogError, match="checkpoint step-x"):
        check_checkpoint(reader, Path("step-x"), Position(step=3, weights_digest="w3", **place | {"lsn_end": 10_000}))
