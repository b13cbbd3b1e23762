"""Supervised steps: assistant turns alone, one denominator for all micro-batches and ranks, every row in the log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molt.admission.order import PromptOrder
from molt.cli.app import run
from molt.cli.programs import run_program
from molt.config import Config
from molt.data.tiny import TEMPLATE, make_model, make_tokenizer, make_warmup
from molt.errors import DataError, SettingError
from molt.learn.demonstrations import HELD_ALIKE, Demonstrations, not_yet_held, places_of_step, plan_of
from molt.learn.rank import PolicyRank
from molt.learn.rows import Row
from molt.learn.sft import warm_up
from molt.learn.supervised_rank import SupervisedRank
from molt.log.reader import LogReader
from molt.log.rows import Segment
from molt.runs import RunDir
from molt.settings import resolve
from tests.learn.tiny import make_rank


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make_model(folder / "model")
    make_warmup(folder / "train.jsonl", num_conversations=24)
    make_warmup(folder / "held_out.jsonl", num_conversations=6, seed=9)
    return folder


def settings(world: Path, **rooms: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(world / "runs"), "name": "sft"},
        "actor": {"model_name_or_path": str(world / "model"), "learning_rate": 1e-3},
        "data": {"max_len": 96, "eval_dataset": str(world / "held_out.jsonl")},
        "sft": {"dataset": str(world / "train.jsonl"), "batch_size": 8},
        "train": {"num_epochs": 2, "micro_batch_tokens": 256},
        "eval": {"interval": 3},
        "ckpt": {"save_interval": 2},
    }
    for room, values in rooms.items():
        base[room] = base.get(room, {}) | values
    return Config.model_validate(base)


def to_row(segment: Segment) -> Row:
    is_target = np.repeat([span.trainable for span in segment.spans], [span.len for span in segment.spans])
    return Row(
        segment_id=segment.segment_id,
        token_ids=segment.token_ids,
        is_sampled=np.zeros_like(is_target),
        is_trainable=is_target,
        behaviour_logprobs=segment.behaviour_logprobs,
        policy_versions=np.full(len(is_target), -1, np.int32),
        temperature=1.0,
        logprobs_mode="none",
    )


def supervised(config: Config, segments: tuple[Segment, ...]) -> SupervisedRank:
    rank = make_rank(config, [to_row(s) for s in segments])
    return SupervisedRank(config, rank.policy, rank.journal, rank=0)


def plan(segments: tuple[Segment, ...], step: int = 0, micro_batch_tokens: int = 256, num_ranks: int = 1) -> Any:
    return plan_of(segments, step=step, seed=0, cursor=0, num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens, policy_version=step)


def test_every_assistant_turn_is_a_target_and_nothing_else(world: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "<calc>1+2</calc>"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    config = settings(world, sft={"dataset": str(tmp_path / "chat.jsonl")})
    (segment,) = Demonstrations.load(config.sft.dataset or "", config).segments
    # bytes and marks: user mark, 1 + 2, end, assistant mark | calc mark, 1 + 2, calc end, end | tool mark, 3, end, assistant mark | 3, end
    assert [(span.len, span.trainable) for span in segment.spans] == [(6, False), (6, True), (4, False), (2, True)]
    assert (segment.n_trainable, segment.n_sampled, segment.purpose, segment.logprobs_mode) == (8, 0, "sft", "none")
    last = config.sft.model_copy(update={"last_turn_only": True})
    (segment,) = Demonstrations.load(config.sft.dataset or "", config.model_copy(update={"sft": last})).segments
    assert [(span.len, span.trainable) for span in segment.spans] == [(16, False), (2, True)]


def test_tools_of_a_row_are_shown_to_its_turns_alone(world: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    rows: list[dict[str, Any]] = [
        {"messages": chat, "tools": json.dumps([{"name": "add"}])},
        {"messages": chat},
        {"messages": chat, "tools": []},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(world, sft={"dataset": str(tmp_path / "chat.jsonl")})
    with pytest.raises(DataError, match="row 1: the chat template does not show the tool 'add'"):
        Demonstrations.load(config.sft.dataset or "", config)
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{%- for tool in tools or [] -%}{{- tool['function']['name'] -}}{%- endfor -%}" + TEMPLATE
    )
    config = settings(world, sft=config.sft.model_dump(), actor={"model_name_or_path": str(tmp_path)})
    shown, without, none = Demonstrations.load(config.sft.dataset or "", config).segments
    assert len(shown.token_ids) == len(without.token_ids) + len("add")  # a byte is a token
    assert shown.n_trainable == without.n_trainable and shown.template_digest != without.template_digest
    assert none.prompt_id == without.prompt_id != shown.prompt_id


def test_loss_is_the_mean_over_target_tokens_whatever_the_cut(world: Path) -> None:
    config = settings(world)
    segments = Demonstrations.load(config.sft.dataset or "", config).segments[:8]
    whole, cut = supervised(config, segments), supervised(config, segments)
    expected = whole.evaluate(plan(segments))
    a, b = whole.train(plan(segments)), cut.train(plan(segments, micro_batch_tokens=32))
    assert abs(a.loss - expected) < 1e-5
    assert abs(a.loss - b.loss) < 1e-5 and abs(a.grad_norm - b.grad_norm) < 1e-4 * a.grad_norm
    assert a.n_kept == a.n_sampled == sum(s.n_trainable for s in segments)
    assert whole.train(plan(segments, step=1)).loss < a.loss
    assert isinstance(whole, PolicyRank) and not whole.journal.written  # nobody sampled them: no score, no gate


def test_demonstrations_are_learned_under_settings_that_correct_what_was_sampled(world: Path) -> None:
    """A command line resolves to a correction by token, as runs that sample ahead need one; nobody sampled these rows."""
    corrected = resolve(flags=["--sft.dataset", str(world / "train.jsonl")]).algo.model_dump()
    assert corrected["advantage"]["is_correction_level"] == "token"
    plain, config = settings(world), settings(world, algo=corrected)
    segments = Demonstrations.load(plain.sft.dataset or "", plain).segments[:8]
    results = [supervised(one, segments).train(plan(segments)) for one in (plain, config)]
    assert results[1].refused is None and results[1].loss == results[0].loss and results[1].n_kept == results[1].n_sampled


def test_each_pass_takes_every_conversation_once() -> None:
    order = PromptOrder(num_prompts=10, seed=3)
    taken = [place for step in range(5) for place in places_of_step(order, step, 4)]
    assert sorted(taken) == sorted((p, e) for e in range(2) for p in range(10))


def test_last_step_takes_what_is_left_of_the_passes() -> None:
    order = PromptOrder(num_prompts=10, seed=3)
    steps = [places_of_step(order, step, 4, num_passes=1) for step in range(3)]  # 10 = 4 + 4 + 2
    assert [len(step) for step in steps] == [4, 4, 2]
    assert sorted(place for step in steps for place in step) == [(p, 0) for p in range(10)]


def test_conversation_that_was_edited_is_not_taken_for_the_one_in_the_log(world: Path) -> None:
    config = settings(world)
    assert config.sft.dataset is not None
    segments = Demonstrations.load(config.sft.dataset, config).segments
    held = [{name: getattr(segment, name) for name in ("segment_id", *HELD_ALIKE)} for segment in segments[:3]]
    assert not_yet_held(segments, held) == list(segments[3:])
    edited = replace(segments[1], prompt_id="another")
    with pytest.raises(DataError, match="conversation 2 of sft is not the one that the log holds: another prompt_id"):
        not_yet_held([segments[0], edited], held)


def test_step_over_a_pass_boundary_never_holds_a_conversation_twice() -> None:
    for seed in range(20):
        places = places_of_step(PromptOrder(num_prompts=3, seed=seed), 0, 5)
        assert len({place for place, _ in places}) == len(places) == 3


def test_too_long_and_silent_conversations_are_named(world: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "1+2"}]}) + "\n")
    with pytest.raises(DataError, match=r"row 1: the conversation has no assistant message"):
        Demonstrations.load(str(file), settings(world))
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 200}]}) + "\n")
    with pytest.raises(DataError, match=r"row 1: 2\d\d tokens, data.max_len=96"):
        Demonstrations.load(str(file), settings(world))


def test_warm_up_lowers_the_loss_and_is_the_same_twice(world: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_steps": 6, "learning_rate": 3e-3, "batch_size": 8}
    losses = [warm_up(world / "model", world / "train.jsonl", target=tmp_path / str(i), **options) for i in range(2)]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == (tmp_path / "1" / "model.safetensors").read_bytes()
    assert (tmp_path / "0" / "tokenizer.json").is_file()


def test_dry_run_reads_the_conversations_and_names_what_is_wrong(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--actor.model_name_or_path", str(world / "model"), "--data.max_len", "96", "--run.dir", str(tmp_path / "runs")]
    assert run(["sft", *flags, "--sft.dataset", str(world / "train.jsonl"), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["data"] | {"digest": ""} == {"num_conversations": 24, "num_held_out": 0, "num_steps": 3, "digest": ""}
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+2"}\n')
    assert run(["sft", *flags, "--sft.dataset", str(tmp_path / "broken.jsonl"), "--dry-run"]) == 2
    assert "no key 'messages'" in " ".join(capsys.readouterr().err.split())
    assert run(["sft", *flags, "--dry-run"]) == 2
    assert "sft.dataset is missing" in capsys.readouterr().err
    idle = ["--algo.loss.entropy_coef", "0.1", "--rollout.temperature", "0.5", "--train.async_queue_size", "0"]
    assert run(["sft", *flags, *idle, "--sft.dataset", str(world / "train.jsonl"), "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    for setting in ("algo.loss.entropy_coef=0.1", "rollout.temperature=0.5", "train.async_queue_size=0"):
        assert f"{setting} does nothing with molt sft" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lance is not fork-safe", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_pipeline_learns_evaluates_and_resumes_from_the_log(world: Path, tmp_path: Path) -> None:
    from molt.audit.report import audit_run

    runs = {"run": {"dir": str(tmp_path), "name": "half"}}
    whole = settings(world, run={"dir": str(tmp_path), "name": "whole"})  # 24 conversations, batches of 8, two passes: six steps
    assert run_program("sft", whole) == 0
    half = settings(world, **runs, train={"num_steps": 3})
    assert run_program("sft", half) == 0
    run = RunDir(path=tmp_path / "half")
    with pytest.raises(SettingError, match=r"sft.batch_size=4 with --resume, but the 3 steps made took 8 conversations each"):
        run_program("sft", settings(world, **runs, train={"num_steps": 6}, sft={"batch_size": 4}), resume=run)
    assert run_program("sft", settings(world, **runs, train={"num_steps": 6}), resume=run) == 0
    cuts = [LogReader.open(tmp_path / name).cut() for name in ("whole", "half")]
    for cut in cuts:
        assert cut.table("segments").num_rows == 30
        assert sorted(cut.table("consumption", ["use_number"])["use_number"].to_pylist()) == [1] * 24 + [2] * 24
        losses = [json.loads(b)["loss_mean"] for b in cut.table("events", ["body"], where="kind = 'evaluated'")["body"].to_pylist()]
        assert losses[-1] < losses[0]
    bodies = [cut.table("events", ["body"], where="kind = 'step_trained'")["body"].to_pylist() for cut in cuts]
    steps = [{step["step"]: step["weights_digest"] for step in map(json.loads, found)} for found in bodies]
    assert steps[0] == steps[1]  # a resumed run ends in the same weights, bit for bit
    assert (tmp_path / "whole" / "checkpoints" / "final" / "model.safetensors").is_file()
    assert audit_run(tmp_path / "half").is_well
