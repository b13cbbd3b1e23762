"""The train verb: what it refuses before anything is written, and Molt's published command line."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from molt.algo.estimators import estimator_names
from molt.cli import app, train_rl_ray
from molt.cli.programs import load_registered, recorded_programs
from molt.cli.train_verbs import made_by
from molt.data.tiny import make_model
from molt.errors import SettingError
from molt.log.producer import Producer
from molt.log.rows import event
from molt.log.writer import LogWriter
from molt.machine import version_of
from molt.runs import RunDir

PUBLISHED = """
python3 -m molt.cli.train_rl_ray \
  --actor.model_name_or_path {model} \
  --data.prompt_dataset {prompts} \
  --data.input_key input \
  --train.agent_path {agent} \
  --vllm.num_engines 2 \
  --vllm.tensor_parallel_size 2 \
  --rollout.batch_size 128 \
  --train.batch_size 128 \
  --train.micro_batch_size 1 \
  --algo.advantage.estimator reinforce \
  --algo.kl.init_coef 0 \
  --fsdp.attn_implementation te \
  --ckpt.output_dir ./ckpt/rl
"""


AGENT = """from molt.agents import env


class AddEnv(env.Env):
    async def step(self, action):
        return env.Result(terminated=True, truncated=False, reward=0.0)


class AgentRunner(env.AgentRunner):
    env = AddEnv
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_model(path)
    return path


@pytest.fixture
def inputs(tmp_path: Path, tiny_model: Path) -> dict[str, str]:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    return {"model": str(model), "agent": str(tmp_path / "agent.py"), "prompts": str(tmp_path / "prompts.jsonl")}


def flags(inputs: dict[str, str], *more: str) -> list[str]:
    given = {"--actor.model_name_or_path": "model", "--data.prompt_dataset": "prompts", "--train.agent_path": "agent"}
    return [word for name, key in given.items() if key in inputs for word in (name, inputs[key])] + list(more)


def test_published_command_line_parses_as_written(inputs, capsys) -> None:
    words = shlex.split(PUBLISHED.format(**inputs))[3:]
    assert train_rl_ray.main([*words, "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    config = json.loads(printed.out)["config"]
    assert (config["vllm"]["num_engines"], config["vllm"]["tensor_parallel_size"]) == (2, 2)
    assert (config["rollout"]["batch_size"], config["train"]["batch_size"]) == (128, 128)
    assert (config["fsdp"]["attn_implementation"], config["ckpt"]["output_dir"]) == ("te", f"{Path.cwd()}/ckpt/rl")
    assert "--algo.kl.init_coef is --algo.kl.coef now" in printed.err
    assert "--train.micro_batch_size does nothing here" in printed.err


def test_published_divergence_gate_keeps_its_meaning() -> None:
    words = "--algo.advantage.is_correction_gating binary_kl --algo.advantage.is_correction_level seq --actor.loss_agg_mode=token-mean"
    translated, notes = train_rl_ray.translate(words.split())
    expected = "--algo.advantage.gate kl --algo.advantage.is_correction_level seq --algo.loss.aggregation=token-mean"
    assert translated == expected.split()
    assert len(notes) == 2


def test_dry_run_writes_nothing_and_says_so(molt, inputs, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    said = molt("train", "--dry-run", *flags(inputs))
    assert said.code == 0
    assert "num_prompts 1" in said.err
    assert "nothing was written" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("model", "actor.model_name_or_path is not given"),
        ("agent", "train.agent_path is not given"),
        ("prompts", "data.prompt_dataset is not given"),
    ],
)
def test_missing_input_is_named(molt, inputs, missing, text) -> None:
    del inputs[missing]
    said = molt("train", *flags(inputs))
    assert said.code == 2
    assert text in said.err


def test_agent_file_that_is_not_there_is_named(molt, inputs) -> None:
    said = molt("train", *flags(inputs | {"agent": "no/such/agent.py"}))
    assert said.code == 2
    assert "train.agent_path=no/such/agent.py, no such file" in said.err


def test_agent_file_that_cannot_be_imported_is_named(molt, inputs) -> None:
    Path(inputs["agent"]).write_text("import no_such_module_anywhere\n")
    said = molt("train", *flags(inputs))
    assert said.code == 2
    assert "it cannot be imported" in said.err
    assert "no_such_module_anywhere" in said.err


def test_unknown_estimator_lists_the_known(molt, inputs) -> None:
    said = molt("train", "--dry-run", *flags(inputs), "--algo.advantage.estimator", "magic")
    assert said.code == 2
    assert "algo.advantage.estimator=magic is unknown" in said.err
    assert "grpo" in said.err


def test_model_without_tokenizer_is_named(molt, inputs) -> None:
    (Path(inputs["model"]) / "tokenizer.json").unlink()
    said = molt("train", *flags(inputs))
    assert said.code == 2
    assert "it holds no tokenizer" in said.err


def test_malformed_prompts_are_found_by_the_dry_run(molt, inputs) -> None:
    Path(inputs["prompts"]).write_text('{"input": "1+1", "label": "2"}\n{"input": \n')
    said = molt("train", "--dry-run", *flags(inputs))
    assert said.code == 2
    assert "prompts.jsonl:2" in said.err.replace("\n", "").replace("│", "").replace(" ", "")


def test_unknown_pipeline_lists_the_known(molt, inputs) -> None:
    said = molt("train", "--pipeline", "nothing", *flags(inputs))
    assert said.code == 2
    assert "pipeline=nothing, no such file" in said.err


def test_pipeline_copy_gets_the_resolved_settings(inputs, tmp_path, monkeypatch, capsys) -> None:
    copy = tmp_path / "mine.py"
    copy.write_text(
        "from molt.errors import StalledError\n\n\n"
        "async def main(config, *, resume=None):\n"
        "    print('got', config.rollout.batch_size, resume)\n"
        "    raise StalledError('rollouts=0 in 5 s, engine vllm-0 is silent; look at its log')\n"
    )
    monkeypatch.chdir(tmp_path)
    code = app.run(["train", "--pipeline", str(copy), *flags(inputs), "--rollout.batch_size", "16"])
    printed = capsys.readouterr()
    assert code == 3, "a stalled run has its own exit code"
    assert "got 16 None" in printed.out
    assert "engine vllm-0 is silent" in printed.err
    assert "Traceback" not in printed.err


def test_resume_takes_the_settings_of_the_run(inputs, tmp_path, monkeypatch, capsys) -> None:
    from molt.runs import create_run
    from molt.settings import resolve

    run = create_run(resolve([], flags(inputs, "--run.dir", str(tmp_path / "runs"), "--run.name", "r", "--rollout.max_turns", "9")))
    copy = tmp_path / "mine.py"
    copy.write_text(
        "def main(config, *, resume=None):\n    print('got', config.rollout.max_turns, config.rollout.temperature, resume.name)\n"
    )
    assert app.run(["train", "--resume", str(run.path), "--pipeline", str(copy), "--rollout.temperature", "0.5"]) == 0
    assert "got 9 0.5 r" in capsys.readouterr().out
    assert app.run(["train", "--resume", str(run.path), "--config", "x.toml"]) == 2


def test_json_output_is_one_document_whatever_the_pipeline_prints(inputs, tmp_path, monkeypatch, capsys) -> None:
    copy = tmp_path / "mine.py"
    copy.write_text("def main(config, *, resume=None):\n    print('a line of progress')\n")
    monkeypatch.chdir(tmp_path)
    assert app.run(["train", "--json", "--pipeline", str(copy), *flags(inputs), "--run.name", "r"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"run": str(tmp_path / "runs" / "r"), "exit_code": 0}
    assert "a line of progress" in printed.err


@pytest.mark.skipif(version_of("transformer-engine") is not None, reason="Transformer Engine is here")
def test_published_command_line_says_what_the_machine_lacks(inputs, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_rl_ray.main(shlex.split(PUBLISHED.format(**inputs))[3:]) == 2
    assert "fsdp.attn_implementation=te needs Transformer Engine" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


async def test_run_remembers_the_copy_of_a_pipeline_that_made_it(tmp_path: Path):
    copy = tmp_path / "my_rl.py"
    copy.write_text(
        "from molt.algo.advantage import estimator\n\n\n"
        "@estimator('remembered')\ndef remembered(inputs):\n    return inputs.spread(inputs.reward_U)\n"
    )
    told = {"config": "{}", "config_digest": "", "code_digest": "", "packages": "{}", "hardware": "{}", "seed": 0, "model_digest": ""}
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process") as writer:
        producer = Producer(writer, "driver")
        for pipeline in (str(copy), "rl", None, str(copy)):
            await producer.append(events=[event("attempt_started", **told, num_steps=1, pid=1, host="h", pipeline=pipeline)])
    run = RunDir(path=tmp_path / "run")
    assert recorded_programs(run) == ["rl", str(copy)]
    assert made_by(run) == str(copy) and made_by(None) is None
    load_registered(run, None)
    assert "remembered" in estimator_names()
    copy.unlink()
    load_registered(run, None)  # replay and ablate miss it only if they need what it registers
    with pytest.raises(SettingError, match=r"my_rl.py, which made the run, is not there; give --pipeline FILE"):
        made_by(run)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--run.name", "used"], "run.name=used is used in"),
        (["--run.name", "a/b"], "run.name='a/b' is no name of a folder"),
        (["--log.store", "nope"], "log.store=nope: no such profile"),
        (["--algo.advantage.estimator", "on_policy_distill"], "on_policy_distill needs reference.model_name_or_path, the teacher"),
    ],
)
def test_dry_run_refuses_what_the_run_would(inputs, tmp_path, capsys, more: list[str], said: str) -> None:
    (tmp_path / "runs" / "used").mkdir(parents=True)
    assert app.run(["train", *flags(inputs, "--run.dir", str(tmp_path / "runs"), *more), "--dry-run", "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]
