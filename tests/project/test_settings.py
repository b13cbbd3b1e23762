"""Settings: layers, flags, unknown and renamed keys, and rules between settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from molt.config import Config
from molt.errors import SettingError
from molt.layout_rules import model_findings
from molt.model_shape import ModelShape
from molt.places import folder
from molt.settings import (
    PATHS,
    RENAMED,
    check,
    config_digest,
    dump_toml,
    field_types,
    flatten,
    parse_flags,
    resolve,
    resolve_recorded,
    with_whole_paths,
)
from molt.settings_docs import describe
from molt.settings_rules import check_inputs, check_output


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(*flags: str) -> str:
    with pytest.raises(SettingError) as caught:
        check(resolve([], flags))
    return str(caught.value)


def test_later_file_and_then_flag_win(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", "[actor]\nlearning_rate = 1e-5\nmax_grad_norm = 2.0\n[rollout]\ntop_k = 5\n")
    second = write(tmp_path / "b.toml", "[actor]\nlearning_rate = 2e-5\n")
    config = resolve([first, second], ["--rollout.top_k", "7"])
    assert (config.actor.learning_rate, config.actor.max_grad_norm, config.rollout.top_k) == (2e-5, 2.0, 7)


@pytest.mark.parametrize(
    "flags",
    [
        ["--rollout.max_new_tokens", "32"],
        ["--rollout.max-new-tokens", "32"],
        ["--rollout.max_new_tokens=32"],
        ["--rollout.max-new-tokens=32"],
    ],
)
def test_flag_takes_dashes_underscores_and_equals(flags: list[str]) -> None:
    assert resolve([], flags).rollout.max_new_tokens == 32


def test_flag_values_follow_the_type_of_the_setting() -> None:
    flags = [
        "--train.partial_rollout_enable",
        "--run.name",
        "7",
        "--algo.kl.target",
        "none",
        "--eval.temperature",
        "0",
        "--vllm.sleep_level",
        "2",
    ]
    assert parse_flags(flags) == {
        "train.partial_rollout_enable": True,
        "run.name": "7",
        "algo.kl.target": None,
        "eval.temperature": 0,
        "vllm.sleep_level": 2,
    }


@pytest.mark.parametrize("words", [["0.5", "5.0"], ["0.5,5.0"], ["[0.5, 5.0]"]])
def test_band_takes_two_values(words: list[str]) -> None:
    assert resolve([], ["--algo.advantage.is_correction_threshold", *words]).algo.advantage.is_correction_threshold == (0.5, 5.0)


def test_single_value_of_a_band_is_its_upper_end() -> None:
    assert resolve([], ["--algo.advantage.is_correction_threshold", "2"]).algo.advantage.is_correction_threshold == (None, 2.0)


def test_unknown_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[actor]\nlearnin_rate = 1e-5\n")
    with pytest.raises(SettingError, match=r"actor\.learnin_rate in .*a\.toml, .* did you mean actor\.learning_rate\?"):
        resolve([path])


def test_unknown_flag_suggests_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"did you mean actor\.model_name_or_path\?"):
        resolve([], ["--actr.model", "x"])


def test_flag_without_value_and_flag_with_too_many() -> None:
    assert "has no value" in refused("--actor.learning_rate")
    assert "takes one value, got 2" in refused("--run.name", "a", "b")
    assert "--algo.reward.clip 1, it takes two values; write --algo.reward.clip LOW HIGH" in refused("--algo.reward.clip", "1")
    assert "is a group of settings" in refused("--actor", "x")
    assert "is not a setting" in refused("stray")


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_renamed_key_fails_with_the_new_name(old: str) -> None:
    assert RENAMED[old] in field_types()
    assert old not in field_types()
    with pytest.raises(SettingError, match=f"write {RENAMED[old]}"):
        resolve([], [f"--{old}", "1"])


def test_wrong_values_are_all_told_with_their_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[actor]\ndtype = 'int8'\nlearning_rate = -1\n")
    with pytest.raises(SettingError) as caught:
        resolve([path])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(str(path) in line for line in lines)
    assert lines[0].startswith("actor.dtype='int8'")


def test_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"missing\.toml, No such file"):
        resolve([tmp_path / "missing.toml"])
    with pytest.raises(SettingError, match=r"a\.toml, .*line 1"):
        resolve([write(tmp_path / "a.toml", "= 3")])


def test_resolved_settings_survive_their_own_toml(tmp_path: Path) -> None:
    flags = ["--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_threshold", "none", "2", "--run.name", "r"]
    config = resolve([], flags)
    again = resolve([write(tmp_path / "c.toml", dump_toml(config))])
    assert again == config
    assert config_digest(again) == config_digest(config)
    check(again)


def test_what_runs_ahead_is_corrected_unless_told_otherwise() -> None:
    def level(*flags: str) -> str:
        return resolve([], flags).algo.advantage.is_correction_level

    assert level() == "token"
    assert level("--train.async_queue_size", "3") == "token"
    assert level("--train.async_queue_size", "0") == "off"
    assert level("--algo.advantage.is_correction_level", "off") == "off"
    assert level("--algo.advantage.is_correction_level", "geo") == "geo"


def test_defaults_are_in_order() -> None:
    check(Config())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--train.batch_size", "7", "--rollout.n_samples_per_prompt", "2"], "train.batch_size=7 needs to be a multiple of"),
        (
            ["--rollout.batch_size", "3", "--train.batch_size", "8", "--rollout.n_samples_per_prompt", "4"],
            "rollout.batch_size=3 groups of 4",
        ),
        (["--train.micro_batch_tokens", "100"], "train.micro_batch_tokens=100 needs at least data.max_len=4096"),
        (["--rollout.max_new_tokens", "4096"], "leaves no room for a prompt"),
        (["--algo.advantage.estimator", "grpo"], "compares the rollouts of a group"),
        (
            ["--admission.max_lag", "0", "--train.async_queue_size", "2"],
            "admission.max_lag=0 needs train.async_queue_size=0 or less, got 2",
        ),
        (
            ["--algo.advantage.decoupled", "--rollout.batch_size", "16", "--train.batch_size", "8"],
            "algo.advantage.decoupled=true takes the trainer for what sampled the tokens of its own version",
        ),
        (
            ["--train.partial_rollout_enable", "--algo.advantage.is_correction_level", "off"],
            "mixes policy versions inside a rollout, got algo.advantage.is_correction_level=off",
        ),
        (
            ["--train.partial_rollout_enable", "--train.async_queue_size", "0", "--algo.advantage.is_correction_level", "token"],
            "nothing is in flight at a refit",
        ),
        (
            ["--algo.advantage.is_correction_mode", "clip", "--algo.advantage.is_correction_level", "off"],
            "does nothing with algo.advantage.is_correction_level=off",
        ),
        (
            ["--algo.advantage.is_correction_threshold", "0.5", "2", "--algo.advantage.is_correction_level", "off"],
            "is_correction_threshold=(0.5, 2.0) does nothing",
        ),
        (["--algo.advantage.gate", "kl", "--train.async_queue_size", "0"], "algo.advantage.gate=kl does nothing"),
        (["--algo.reward.filter_range", "1", "0"], "keeps nothing"),
        (["--critic.learning_rate", "1"], "critic.learning_rate=1.0 does nothing"),
        (["--reference.model_name_or_path", "x"], "reference.model_name_or_path=x does nothing"),
        (["--algo.kl.use", "reward"], "algo.kl.use=reward does nothing with algo.kl.coef=0"),
        (["--eval.interval", "2"], "eval.interval=2 needs data.eval_dataset"),
        (["--eval.max_prompts", "2"], "eval.max_prompts=2 does nothing"),
        (["--vllm.engine", "embedded", "--vllm.tensor_parallel_size", "2"], "does nothing with vllm.engine=embedded"),
        (["--vllm.engine", "vllm", "--vllm.compile", "false", "--vllm.enforce_eager"], "vllm.compile=False does nothing"),
        (["--actor.moe_router_dtype", "float32"], "actor.moe_router_dtype=float32 does nothing with actor.dtype=float32"),
        (["--reference.placement", "apart"], "reference.placement=apart does nothing"),
        (["--vllm.num_speculative_tokens", "2", "--train.routing_replay"], "rejected drafts pass through the experts"),
        (["--vllm.kv_on_refit", "keep"], "does nothing with train.partial_rollout_enable=false"),
        (["--vllm.engine", "embedded", "--vllm.weight_transfer", "ipc"], "vllm.weight_transfer=ipc needs vllm.engine=vllm"),
        (["--vllm.weight_transfer", "ipc", "--placement.trainer", "apart"], "memory of a GPU that trainer and engine share"),
        (["--vllm.weight_transfer", "nccl", "--placement.trainer", "colocated"], "which NCCL refuses to two processes on one"),
        (["--vllm.sleep_level", "1"], "the refit after it would wait for their end"),
        (["--vllm.sleep_level", "1", "--train.async_queue_size", "0", "--admission.max_lag", "2"], "let nothing run ahead"),
        (["--vllm.sleep_level", "1", "--train.async_queue_size", "0", "--placement.trainer", "apart"], "got placement.trainer=apart"),
        (["--vllm.sleep_level", "2", "--train.partial_rollout_enable", "--vllm.kv_on_refit", "keep"], "drops the cache"),
        (["--vllm.engine", "vllm", "--vllm.enable_expert_parallel"], "does nothing with engines of one GPU"),
        (["--fsdp.tp_size", "2"], "fsdp.num_ranks=1 needs to be a multiple of fsdp.tp_size=2"),
        (["--fsdp.ep_size", "2"], "fsdp.ep_size=2 needs to divide fsdp.num_ranks=1"),
        (["--fsdp.num_ranks", "6", "--fsdp.cp_size", "2", "--fsdp.replicas", "2"], "fsdp.replicas=2; set it to 4"),
        (["--fsdp.ep_size", "2", "--fsdp.num_ranks", "2", "--actor.implementation", "hf"], "needs actor.implementation=automodel"),
        (["--fsdp.tp_size", "2", "--fsdp.num_ranks", "2", "--actor.implementation", "automodel"], "needs actor.implementation=hf"),
        (["--fsdp.tp_size", "2", "--fsdp.num_ranks", "4", "--fsdp.ep_size", "2"], "experts are shared by one or the other"),
        (["--fsdp.ep_size", "2", "--fsdp.num_ranks", "2", "--fsdp.offload", "full"], "fsdp.offload=full does nothing with fsdp.ep_size=2"),
        (["--fsdp.cp_size", "2", "--fsdp.num_ranks", "2", "--fsdp.attn_implementation", "flex"], "needs fsdp.attn_implementation=sdpa"),
        (["--fsdp.tp_size", "2", "--fsdp.num_ranks", "2", "--fsdp.attn_implementation", "te"], "te needs fsdp.tp_size=1"),
        (["--fsdp.attn_implementation", "te", "--actor.implementation", "hf"], "fsdp.attn_implementation=te needs"),
        (["--actor.min_learning_rate", "1", "--actor.schedule", "linear"], "is above actor.learning_rate"),
        (["--rollout.top_p", "0.9", "--algo.advantage.is_correction_level", "token"], "every ratio is biased"),
    ],
)
def test_settings_that_contradict_or_do_nothing_are_refused(flags: list[str], text: str) -> None:
    message = refused(*flags)
    assert text in message
    assert message.count("\n") == 0, "one fault is one line"


@pytest.mark.parametrize(
    ("flags", "kind", "text"),
    [
        (["--actor.freeze_vision", "false"], "qwen3", "actor.freeze_vision=False does nothing with a model that takes no images (llama)"),
        (["--data.max_images", "2"], "qwen3", "data.max_images=2 does nothing with a model that takes no images"),
        (["--data.max_image_pixels", "99"], "qwen3", "data.max_image_pixels=99 does nothing"),
        (["--data.images_key", "pictures"], "qwen3", "data.images_key=pictures does nothing"),
        (["--fsdp.num_ranks", "2", "--fsdp.tp_size", "2"], "idefics3", "fsdp.tp_size=2 cannot spread a model that takes images"),
        (["--fsdp.num_ranks", "2", "--fsdp.cp_size", "2"], "idefics3", "fsdp.cp_size=2 cannot spread a model that takes images"),
        (["--actor.implementation", "automodel"], "llava", "actor.implementation=automodel does not load models that take images"),
    ],
)
def test_settings_of_images_fit_the_model(tmp_path: Path, flags: list[str], kind: str, text: str) -> None:
    text_config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    write(tmp_path / "config.json", json.dumps({"model_type": kind, "text_config": text_config}))
    found = list(model_findings(resolve(flags=flags), ModelShape.read(tmp_path)))
    assert len(found) == 1 and found[0].startswith(text)
    assert list(model_findings(resolve(), ModelShape.read(tmp_path))) == []


def test_every_setting_is_described_once() -> None:
    documented = describe()
    assert [entry.key for entry in documented] == list(field_types())
    assert list(flatten(Config())) == list(field_types())


@pytest.mark.parametrize("path", sorted(folder("recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipe_is_in_order(path: Path) -> None:
    check(resolve([path], ["--actor.model_name_or_path", "model"]))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--fsdp.tp_size", "8"], "fsdp.tp_size=8 does not divide the model's 12 attention heads; set fsdp.tp_size=6"),
        (["--fsdp.tp_size", "3"], "fsdp.tp_size=3 does not divide the model's 4 key-value heads; set fsdp.tp_size=2"),
        (["--fsdp.tp_size", "4"], "fsdp.tp_size=4 does not divide the model's 102 entries of the vocabulary; set fsdp.tp_size=3"),
        (["--fsdp.ep_size", "4"], "fsdp.ep_size=4 does not divide the model's 6 experts; set fsdp.ep_size=3"),
        (["--vllm.num_speculative_tokens", "2"], "vllm.num_speculative_tokens=2 needs a model with a multi-token-prediction head"),
        (["--data.max_len", "65"], "data.max_len=65 is longer than the model's 64 positions"),
        (["--vllm.tensor_parallel_size", "8"], "vllm.tensor_parallel_size=8 does not divide the model's 12 attention heads"),
    ],
)
def test_layouts_that_the_model_does_not_allow_are_refused_from_its_config_alone(tmp_path: Path, flags: list[str], text: str) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(shape | experts | {"vocab_size": 102, "max_position_embeddings": 64}))
    default = [] if "--data.max_len" in flags else ["--data.max_len", "64"]
    assert text in next(model_findings(resolve(flags=[*flags, *default]), ModelShape.read(tmp_path)))


def test_folder_that_holds_something_else_is_not_given_to_the_exported_model(tmp_path: Path) -> None:
    def given(folder: Path) -> Config:
        return resolve([], ["--ckpt.output_dir", str(folder), "--actor.model_name_or_path", str(tmp_path / "model")])

    for name in ("model", "empty", "exported", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    for name in ("model", "exported"):
        (tmp_path / name / ".molt-export").touch()
    for name in ("new", "empty", "exported"):
        check_output(given(tmp_path / name))
    with pytest.raises(SettingError, match=r"output_dir=.*notes, it holds something that no run exported"):
        check_output(given(tmp_path / "notes"))
    with pytest.raises(SettingError, match="it is a file"):
        check_output(given(tmp_path / "notes" / "thesis.txt"))
    with pytest.raises(SettingError, match=r"would replace actor\.model_name_or_path"):
        check_output(given(tmp_path / "empty" / ".." / "model"))


def test_paths_are_whole_in_what_a_run_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--data.prompt_dataset=p.jsonl", "--train.agent_path=../a.py", "--log.store=process", "--actor.model_name_or_path=/models/m"]
    found = with_whole_paths(resolve(flags=flags))
    assert (found.data.prompt_dataset, found.train.agent_path) == (f"{tmp_path}/p.jsonl", f"{tmp_path}/../a.py")
    assert (found.log.store, found.actor.model_name_or_path, found.sft.dataset) == ("process", "/models/m", None)
    assert with_whole_paths(found) == found
    assert with_whole_paths(resolve(flags=["--log.store=mine.toml"])).log.store == f"{tmp_path}/mine.toml"


def test_every_setting_that_names_a_file_is_known_as_a_path() -> None:
    named = {key for key in field_types() if key.endswith(("path", "dataset", "dir"))}
    assert named | {"log.store"} == set(PATHS)


def test_what_a_run_recorded_at_its_default_counts_as_not_given_when_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump_toml(resolve(flags=["--data.input_key=question", "--algo.advantage.is_correction_level=off"])))
    found = resolve_recorded(tmp_path / "run.toml", ["--data.label_key=label", "--actor.learning_rate=2e-6"])
    assert found.data.model_fields_set == {"input_key", "label_key"}  # a label that nobody asked for may be missing
    assert (found.actor.model_fields_set, found.critic.model_fields_set) == ({"learning_rate"}, set())
    assert found.algo.advantage.is_correction_level == "off"
    assert resolve_recorded(tmp_path / "run.toml") == resolve([tmp_path / "run.toml"])


def test_conversations_are_refused_where_rollouts_train() -> None:
    with pytest.raises(SettingError, match=r"sft\.batch_size=4 does nothing with molt train"):
        check_inputs(resolve([], ["--sft.batch_size", "4"]))
