"""Rules between settings: what contradicts itself, and what does nothing under the given settings, is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt.algo.rules import check_algo
from molt.config import Config, Room
from molt.engine_rules import engine_findings
from molt.errors import SettingError
from molt.hub import is_name
from molt.layout_rules import layout_findings, model_findings
from molt.model_shape import ModelShape

GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
"""Estimators that compare the rollouts of one group; with one rollout in it every advantage is 0."""


EXPORTED = ".molt-export"
"""A file in every exported model: a folder that holds it may be replaced by the next one."""


def check(config: Config) -> None:
    """Refuse settings that contradict each other. Every finding is a line of one SettingError."""
    findings = [*_batches(config), *_staleness(config), *_algorithm(config), *_engine(config), *_idle(config), *_mesh(config)]
    if findings:
        raise SettingError("\n".join(findings))


def check_inputs(config: Config) -> None:
    """Refuse a training run whose model, prompts or agent are absent, or that is told of conversations, before anything is written."""
    sft = config.sft
    told = [_nothing(f"sft.{name}", getattr(sft, name), "molt train") for name in type(sft).model_fields if _given(sft, name)]
    findings = [*_model_folder(config), *_teacher(config), *_files(config), *_output(config), *told]
    if findings:
        raise SettingError("\n".join(findings))


def check_supervised(config: Config) -> None:
    """Refuse settings of rollouts and of what learns from them, which supervised steps do not read."""
    findings = [
        _nothing(f"{room}.{name}", getattr(own, name), "molt sft, which generates nothing")
        for room, own, name in _of_rollouts(config)
        if _given(own, name)
    ]
    if findings:
        raise SettingError("\n".join(findings))


def _of_rollouts(config: Config) -> Iterator[tuple[str, Room, str]]:
    """Name of its room, room and name of each setting that has no meaning without rollouts."""
    algo = config.algo
    whole = {name: getattr(config, name) for name in ("admission", "critic", "reference", "rollout", "vllm")}
    whole |= {"algo.advantage": algo.advantage, "algo.kl": algo.kl, "algo.loss": algo.loss, "algo.reward": algo.reward}
    for name, room in whole.items():
        yield from ((name, room, setting) for setting in type(room).model_fields if not _is_filled_in(room, setting))
    for setting in ("agent_path", "batch_size", "async_queue_size", "partial_rollout_enable", "routing_replay"):
        yield "train", config.train, setting
    for setting in ("n_samples_per_prompt", "temperature", "max_prompts"):
        yield "eval", config.eval, setting
    yield "data", config.data, "prompt_dataset"


def _is_filled_in(room: Room, name: str) -> bool:
    """Whether a setting has what molt.settings gives it where nobody did."""
    return name == "is_correction_level" and getattr(room, name) == "token"


def check_output(config: Config) -> None:
    """Refuse a folder for the exported model that holds something else: the export replaces it whole."""
    if findings := list(_output(config)):
        raise SettingError("\n".join(findings))


def _batches(config: Config) -> Iterator[str]:
    train, rollout, data = config.train, config.rollout, config.data
    members = rollout.n_samples_per_prompt
    if train.batch_size % members:
        yield (
            f"train.batch_size={train.batch_size} needs to be a multiple of rollout.n_samples_per_prompt={members}, "
            f"since a group trains whole; set it to {max(1, train.batch_size // members) * members}"
        )
    elif rollout.batch_size * members % train.batch_size:
        yield (
            f"rollout.batch_size={rollout.batch_size} groups of {members} are {rollout.batch_size * members} rollouts, no multiple of "
            f"train.batch_size={train.batch_size}; set rollout.batch_size={config.groups_per_step}"
        )
    if train.micro_batch_tokens < data.max_len:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens} needs at least data.max_len={data.max_len}, "
            f"since a segment is never split; set it to {data.max_len} or lower data.max_len"
        )
    if rollout.max_new_tokens >= data.max_len:
        yield (
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt in data.max_len={data.max_len}; "
            f"lower it or raise data.max_len"
        )
    if members == 1 and config.algo.advantage.estimator in GROUP_ESTIMATORS:
        yield (
            f"algo.advantage.estimator={config.algo.advantage.estimator} compares the rollouts of a group, got "
            f"rollout.n_samples_per_prompt=1; raise it or take reinforce"
        )


def _staleness(config: Config) -> Iterator[str]:
    queue, lag = config.train.async_queue_size, config.admission.max_lag
    if lag is not None and lag < queue:
        yield (
            f"admission.max_lag={lag} needs train.async_queue_size={lag} or less, got {queue}; groups generated further ahead "
            f"would only be dropped; set train.async_queue_size={lag} or raise admission.max_lag"
        )
    per_version = config.rollout.batch_size // max(1, config.groups_per_step)
    if config.algo.advantage.decoupled and per_version > 1:
        yield (
            f"algo.advantage.decoupled=true takes the trainer for what sampled the tokens of its own version, and with rollout.batch_size="
            f"{config.rollout.batch_size} each version trains {per_version} steps, of which the first alone is so; "
            f"set rollout.batch_size={config.groups_per_step} or decoupled=false"
        )
    if config.train.partial_rollout_enable:
        if queue == 0:
            yield "train.partial_rollout_enable=true does nothing with train.async_queue_size=0, nothing is in flight at a refit; drop it"
        if config.algo.advantage.is_correction_level == "off":
            yield (
                "train.partial_rollout_enable=true mixes policy versions inside a rollout, got algo.advantage.is_correction_level=off; "
                "set it to token, seq or geo"
            )


def _algorithm(config: Config) -> Iterator[str]:
    """The algorithm's own rules, and what it says nothing of."""
    try:
        check_algo(config.algo)
    except SettingError as error:
        yield str(error)
    rollout, level = config.rollout, config.algo.advantage.is_correction_level
    if level != "off" and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k} with algo.advantage.is_correction_level={level}: "
            "sampled log-probs are renormalised over the kept tokens, the trainer's are not, so that every ratio is biased; "
            "set top_p to 1 and top_k to 0, or the level to off with train.async_queue_size=0"
        )
    if config.actor.min_learning_rate > config.actor.learning_rate:
        yield (
            f"actor.min_learning_rate={config.actor.min_learning_rate} is above actor.learning_rate={config.actor.learning_rate}; lower it"
        )


def _engine(config: Config) -> Iterator[str]:
    yield from engine_findings(config)
    if config.train.routing_replay and config.vllm.num_speculative_tokens:
        yield (
            f"vllm.num_speculative_tokens={config.vllm.num_speculative_tokens} with train.routing_replay=true: rejected drafts pass "
            "through the experts too, so a token could get their routes; set num_speculative_tokens to 0 or routing_replay to false"
        )


def _idle(config: Config) -> Iterator[str]:
    """Settings that were given and do nothing."""
    algo, advantage = config.algo, config.algo.advantage
    if advantage.is_correction_level == "off" and _given(advantage, "is_correction_mode"):
        yield _nothing("algo.advantage.is_correction_mode", advantage.is_correction_mode, "algo.advantage.is_correction_level=off")
    if advantage.estimator != "gae":
        for name in sorted(config.critic.model_fields_set):
            if _given(config.critic, name):
                yield _nothing(f"critic.{name}", getattr(config.critic, name), f"algo.advantage.estimator={advantage.estimator}")
        if _given(advantage, "lambd"):
            yield _nothing("algo.advantage.lambd", advantage.lambd, f"algo.advantage.estimator={advantage.estimator}")
    needs_reference = algo.kl.coef > 0 or advantage.estimator == "on_policy_distill"
    for name in ("model_name_or_path", "offload", "placement"):
        if not needs_reference and _given(config.reference, name):
            yield _nothing(f"reference.{name}", getattr(config.reference, name), "algo.kl.coef=0")
    for name in ("estimator", "use", "target", "horizon"):
        if algo.kl.coef == 0 and _given(algo.kl, name):
            yield _nothing(f"algo.kl.{name}", getattr(algo.kl, name), "algo.kl.coef=0")
    if algo.kl.coef > 0 and algo.kl.target is None and _given(algo.kl, "horizon"):
        yield _nothing("algo.kl.horizon", algo.kl.horizon, "no algo.kl.target")
    if algo.reward.overlong_buffer == 0 and _given(algo.reward, "overlong_penalty"):
        yield _nothing("algo.reward.overlong_penalty", algo.reward.overlong_penalty, "algo.reward.overlong_buffer=0")
    if config.actor.schedule == "constant" and _given(config.actor, "min_learning_rate"):
        yield _nothing("actor.min_learning_rate", config.actor.min_learning_rate, "actor.schedule=constant")
    if config.actor.dtype == "float32" and _given(config.actor, "moe_router_dtype"):
        yield _nothing("actor.moe_router_dtype", config.actor.moe_router_dtype, "actor.dtype=float32")
    yield from _idle_evaluation(config)
    yield from _idle_engine(config)


def _idle_evaluation(config: Config) -> Iterator[str]:
    if config.eval.interval > 0 and config.data.eval_dataset is None:
        yield f"eval.interval={config.eval.interval} needs data.eval_dataset, got none; give it or set eval.interval=0"
    if config.eval.interval == 0:
        for name in ("n_samples_per_prompt", "temperature", "max_prompts"):
            if _given(config.eval, name):
                yield _nothing(f"eval.{name}", getattr(config.eval, name), "eval.interval=0")


def _idle_engine(config: Config) -> Iterator[str]:
    vllm = config.vllm
    if vllm.engine == "embedded":
        only_vllm = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
        for name in (
            *only_vllm,
            "compile",
            "enable_expert_parallel",
            "enable_chunked_prefill",
            "kv_cache_space_gib",
            "seed_calls",
            "num_speculative_tokens",
            "sleep_level",
        ):
            if _given(vllm, name):
                yield _nothing(f"vllm.{name}", getattr(vllm, name), "vllm.engine=embedded")
    elif vllm.enforce_eager and _given(vllm, "compile"):
        yield _nothing("vllm.compile", vllm.compile, "vllm.enforce_eager=true")
    if not config.train.partial_rollout_enable and _given(vllm, "kv_on_refit"):
        yield _nothing("vllm.kv_on_refit", vllm.kv_on_refit, "train.partial_rollout_enable=false")


def _mesh(config: Config) -> Iterator[str]:
    yield from layout_findings(config)
    fsdp = config.fsdp
    if fsdp.attn_implementation == "te" and config.actor.implementation == "hf":
        yield (
            "fsdp.attn_implementation=te needs actor.implementation=automodel, got hf; "
            "set actor.implementation=automodel or fsdp.attn_implementation=sdpa"
        )


def _model_folder(config: Config) -> Iterator[str]:
    path = config.actor.model_name_or_path
    if path is None:
        yield "actor.model_name_or_path is not given; give --actor.model_name_or_path FOLDER"
        return
    folder = Path(path)
    if not folder.is_dir():
        yield f"actor.model_name_or_path={path}, no such folder; give a folder with a Hugging Face model"
    elif not (folder / "config.json").is_file():
        yield f"actor.model_name_or_path={path}, it holds no config.json; give a folder with a Hugging Face model"
    elif not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")):
        yield f"actor.model_name_or_path={path}, it holds no tokenizer; save the tokenizer of the model into that folder"
    else:
        yield from model_findings(config, ModelShape.read(folder))


def _teacher(config: Config) -> Iterator[str]:
    if config.algo.advantage.estimator == "on_policy_distill" and config.reference.model_name_or_path is None:
        yield (
            "algo.advantage.estimator=on_policy_distill needs reference.model_name_or_path, the teacher: without one the policy as it "
            "began is, and there is nothing to learn; give --reference.model_name_or_path FOLDER"
        )


def _files(config: Config) -> Iterator[str]:
    agent = config.train.agent_path
    if agent is None:
        yield "train.agent_path is not given; give --train.agent_path FILE.py that exports AgentRunner"
    elif not Path(agent).is_file():
        yield f"train.agent_path={agent}, no such file; give a Python file that exports AgentRunner"
    for name, is_needed in (("prompt_dataset", True), ("eval_dataset", False)):
        path = getattr(config.data, name)
        if path is None and is_needed:
            yield f"data.{name} is not given; give --data.{name} FILE (JSONL, Parquet or a Hugging Face data set folder)"
        elif path is not None and not Path(path).exists():
            fetched = f"; hf download {path} --repo-type dataset --local-dir FOLDER fetches one of the Hub" if is_name(path) else ""
            yield f"data.{name}={path}, no such file or folder; give JSONL, Parquet or a Hugging Face data set folder{fetched}"


def _output(config: Config) -> Iterator[str]:
    given = config.ckpt.output_dir
    if given is None:
        return
    folder, rooms = Path(given), ("actor", "critic", "reference")
    models = {name: getattr(config, name).model_name_or_path for name in rooms}
    if same := [name for name, path in models.items() if path is not None and Path(path).resolve() == folder.resolve()]:
        yield f"ckpt.output_dir={given}, the export would replace {same[0]}.model_name_or_path; give another folder"
    elif folder.exists() and not folder.is_dir():
        yield f"ckpt.output_dir={given}, it is a file; give a new or empty folder for the exported model"
    elif folder.is_dir() and any(folder.iterdir()) and not (folder / EXPORTED).is_file():
        yield f"ckpt.output_dir={given}, it holds something that no run exported, and the export replaces it; give a new or empty folder"


def _given(room: Room, name: str) -> bool:
    """True when the setting was given and is not what it would be anyway."""
    return name in room.model_fields_set and getattr(room, name) != type(room).model_fields[name].default


def _nothing(key: str, value: Any, because: str) -> str:
    return f"{key}={value} does nothing with {because}; drop it"
