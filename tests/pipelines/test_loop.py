"""The loop end to end on real Ray, log and FSDP2: audits, replays, resumes after a kill, drains on Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.conftest import ROOT, World

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def test_asynchronous_run_audits_clean_and_its_ledger_closes(trained: World):
    report = trained.audit("once")
    assert report["is_well"] and len(report["invariants"]) >= 9
    generated = sum(line["n_tokens"] for line in report["ledger"] if line["fate"] == "generated")
    accounted = sum(line["n_tokens"] for line in report["ledger"] if line["fate"] != "generated")
    assert generated == accounted > 0
    assert trained.sql("once", "select reason, num_steps from attempt_ended") == [{"reason": "finished", "num_steps": 6}]
    lags = trained.sql("once", "select distinct lag from consumption order by lag")
    assert [row["lag"] for row in lags] == [0, 1]  # generation ran one version ahead
    refits = trained.sql("once", "select policy_version, weights_digest from weights_refit order by policy_version")
    assert [row["policy_version"] for row in refits] == list(range(7))
    assert len({row["weights_digest"] for row in refits}) == 7


def test_log_opens_in_plain_lance_and_duckdb(trained: World):
    program = """
import sys
import duckdb, lance
segments = lance.dataset(sys.argv[1] + "/log/segments.lance")
print(duckdb.sql("select count(*) from segments where n_sampled > 0").fetchall()[0][0])
assert not any(name.split(".")[0] == "molt" for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program, str(trained.run("once"))], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == 6 * 4 * 4  # six steps of four groups of four rollouts, one segment each


def test_replay_reproduces_every_batch_loss_and_the_last_weights(trained: World):
    done = trained.molt("replay", trained.run("once"), "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert (report["is_equal"], report["num_compared"]) == (True, 6)
    (last,) = trained.sql("once", "select weights_digest from step_trained order by step desc limit 1")
    assert report["weights_digest"] == last["weights_digest"]


def test_replay_stops_at_the_first_difference_and_names_it(trained: World):
    """Another model under the recorded path: the first scores differ, and so does the digest that is compared before."""
    model, kept = trained.path / "model" / "model.safetensors", trained.path / "kept.safetensors"
    shutil.copy(model, kept)
    try:
        with model.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\x3f")
        done = trained.molt("replay", trained.run("once"))
    finally:
        shutil.move(kept, model)
    assert done.returncode == 1
    assert "the run began with" in done.stderr + done.stdout


def test_killed_driver_resumes_without_skipping_or_doubling(world: World, wait_for):
    flags = world.flags("killed", train__num_steps=8, ckpt__save_interval=3)
    driver = world.start("killed", "train", *flags)
    try:
        wait_for(lambda: "step=4 " in world.output("killed"), 150, "step 4")
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(30)
    resumed = world.molt("train", "--resume", world.run("killed"))
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    world.audit("killed")  # prompts_in_order, trained_once, retrained_alike and the sum are among its questions
    (attempt,) = world.sql("killed", "select resumed_from_step, resumed_from_checkpoint from attempt_started where attempt = 2")
    assert attempt == {"resumed_from_step": 3, "resumed_from_checkpoint": "step-00000003"}
    again = world.sql("killed", "select step, count(distinct weights_digest) as n from step_trained group by step order by step")
    assert [row["step"] for row in again] == list(range(8))
    assert all(row["n"] == 1 for row in again)  # what was trained again gave the same weights, bit by bit
    replayed = world.molt("replay", world.run("killed"))
    assert replayed.returncode == 0, replayed.stdout[-3000:] + replayed.stderr[-3000:]


def test_run_whose_log_was_lost_is_not_taken_up_as_if_it_had_just_begun(trained: World):
    shutil.copytree(trained.run("once"), trained.run("lost"))
    shutil.rmtree(trained.run("lost") / "log")
    resumed = trained.molt("train", "--resume", trained.run("lost"), "--train.num_steps=8")
    said = resumed.stdout + resumed.stderr
    assert resumed.returncode == 1, said[-3000:]
    assert "ends at lsn -1, but checkpoint step-00000006 builds on lsn" in " ".join(said.split())


def test_killed_run_goes_on_under_another_number_of_ranks_and_every_step_replays(world: World, wait_for):
    driver = world.start("widened", "train", *world.flags("widened", train__num_steps=6, ckpt__save_interval=2))
    try:
        wait_for(lambda: "step=3 " in world.output("widened"), 150, "step 3")
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(30)
    resumed = world.molt("train", "--resume", world.run("widened"), "--fsdp.num_ranks=2")
    said = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, said[-3000:]
    world.audit("widened")
    (changed,) = world.sql("widened", "select from_step, changed, is_exact, num_replanned, attempt from settings_changed")
    step = changed["from_step"]
    assert step in (2, 4) and (changed["attempt"], changed["is_exact"]) == (2, False)
    assert json.loads(changed["changed"]) == {"fsdp.num_ranks": [1, 2]}
    assert f"goes on from step {step} with fsdp.num_ranks 1 -> 2" in said
    # A plan of the first attempt that was not in the checkpoint is cut for two ranks, and is the newest of its step.
    cuts = world.sql("widened", "select step, attempt, json_array_length(plan, '$.micro_batches') as n from batch_planned order by lsn")
    newest = {row["step"]: row["n"] for row in cuts}
    assert newest == {n: 1 if n < step else 2 for n in range(6)}
    again = {row["step"] for row in cuts if row["attempt"] == 1 and row["step"] >= step}
    assert changed["num_replanned"] == len(again)
    ranks = world.sql("widened", "select step, count(distinct rank) as n from counted_consumption group by step order by step")
    assert [row["n"] for row in ranks] == [1 if n < step else 2 for n in range(6)]
    replayed = world.molt("replay", world.run("widened"), "--json")
    assert replayed.returncode == 0, replayed.stdout[-3000:] + replayed.stderr[-3000:]
    report = json.loads(replayed.stdout[replayed.stdout.index("{") :])
    assert (report["num_compared"], report["num_spans"]) == (6, 2)
    # Then two ranks that share each row's tokens, for two further steps: the order of prompts and the ledger go on.
    sliced = world.molt("train", "--resume", world.run("widened"), "--fsdp.num_ranks=2", "--fsdp.cp_size=2", "--train.num_steps=8")
    assert sliced.returncode == 0, sliced.stdout[-3000:] + sliced.stderr[-3000:]
    world.audit("widened")
    again = world.molt("replay", world.run("widened"), "--json")
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    report = json.loads(again.stdout[again.stdout.index("{") :])
    assert (report["num_compared"], report["num_spans"]) == (8, 3)


def test_first_interrupt_drains_and_the_run_can_go_on(world: World, wait_for):
    driver = world.start("drained", "train", *world.flags("drained", train__num_steps=200, rollout__batch_size=4))
    wait_for(lambda: "step=1 " in world.output("drained"), 150, "step 1")
    driver.send_signal(signal.SIGINT)
    assert driver.wait(90) == 130, world.output("drained")[-3000:]
    assert "draining" in world.output("drained")
    (ended,) = world.sql("drained", "select reason, num_steps from attempt_ended")
    assert ended["reason"] == "drained" and ended["num_steps"] < 200
    world.audit("drained")
    resumed = world.molt("train", "--resume", world.run("drained"), f"--train.num_steps={ended['num_steps'] + 2}")
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    world.audit("drained")


def test_run_that_ends_inside_a_version_goes_on_under_one_of_its_own(world: World):
    """Two steps a version, three steps: the third one's weights are neither those that were served then nor those of version 1."""
    two_steps = {"rollout__batch_size": 8, "eval__interval": 1, "eval__max_prompts": 2, "data__eval_dataset": world.path / "prompts.jsonl"}
    world.train("halved", train__num_steps=3, **two_steps)
    checkpoint = world.run("halved") / "checkpoints" / "step-00000003" / "position.json"
    position = checkpoint.read_bytes()
    for num_steps in (3, 5):  # there is nothing to do at first
        resumed = world.molt("train", "--resume", world.run("halved"), f"--train.num_steps={num_steps}")
        assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
        assert checkpoint.read_bytes() == position and json.loads(position)["policy_version"] == 2
    world.audit("halved")
    # Version 1 after two steps, 2 after the third, at which the attempt ended, and 3 after two further ones.
    served = world.sql("halved", "select policy_version, count(distinct weights_digest) as n from weights_refit group by 1 order by 1")
    assert served == [{"policy_version": version, "n": 1} for version in range(4)]
    plans = world.sql("halved", "select step, policy_version from batch_planned order by step")
    assert [row["policy_version"] for row in plans] == [0, 0, 1, 2, 2]
    evaluated = """select e.step, e.policy_version from evaluated e join weights_refit r using (policy_version, weights_digest)
        group by all order by all"""
    assert [tuple(row.values()) for row in world.sql("halved", evaluated)] == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 3)]


def test_two_ranks_train_and_evaluate_from_the_log_and_replay_equal(world: World):
    prompts = world.path / "prompts.jsonl"
    world.train("two-ranks", fsdp__num_ranks=2, train__num_steps=3, eval__interval=2, data__eval_dataset=prompts, eval__max_prompts=4)
    world.audit("two-ranks")
    (evaluated,) = world.sql("two-ranks", "select step, num_rollouts, num_failed, weights_digest from evaluated")
    (served,) = world.sql("two-ranks", "select weights_digest from weights_refit where policy_version = 2")
    assert evaluated == {"step": 2, "num_rollouts": 4, "num_failed": 0, "weights_digest": served["weights_digest"]}
    assert world.sql("two-ranks", "select count(*) as n from consumption where segment_id like 'eval%'") == [{"n": 0}]
    ranks = world.sql("two-ranks", "select distinct rank from consumption order by rank")
    assert [row["rank"] for row in ranks] == [0, 1]
    replayed = world.molt("replay", world.run("two-ranks"))
    assert replayed.returncode == 0, replayed.stdout[-3000:] + replayed.stderr[-3000:]


def test_real_questions_run_through_the_math_agent(world: World):
    rows = Path(__file__).parents[1] / "data" / "fixtures" / "gsm8k_8.jsonl"
    world.train(
        "math",
        data__prompt_dataset=rows,
        data__input_key="question",
        data__label_key="answer",
        data__max_len=1024,
        train__micro_batch_tokens=4096,
        train__agent_path=Path(__file__).parents[2] / "examples" / "math_agent.py",
        train__num_steps=1,
        train__batch_size=4,
        rollout__batch_size=2,
        rollout__n_samples_per_prompt=2,
        algo__advantage__estimator="reinforce_baseline",
    )
    world.audit("math")
    assert len(world.sql("math", "select reward from rollouts")) >= 4


def test_used_name_is_refused_and_the_run_is_untouched(trained: World):
    before = sorted(path for path in trained.run("once").rglob("*"))
    done = trained.molt("train", *trained.flags("once"))
    assert done.returncode == 2 and "run.name=once is used" in done.stderr + done.stdout
    assert sorted(path for path in trained.run("once").rglob("*")) == before


def test_agent_that_always_raises_stops_the_run_with_its_error(world: World, tmp_path: Path):
    agent = tmp_path / "broken.py"
    agent.write_text(
        "import molt.agents as agents\n\n\n"
        "class BrokenEnv(agents.Env):\n    async def step(self, action):\n        raise KeyError('no such tool')\n\n\n"
        "class AgentRunner(agents.AgentRunner):\n    env = BrokenEnv\n"
    )
    done = world.molt("train", *world.flags("broken", train__agent_path=agent, rollout__num_tries=1))
    assert done.returncode == 3 and "KeyError" in done.stderr + done.stdout
    world.audit("broken")
    failed = world.sql("broken", "select distinct reason from rollout_failed")
    assert [row["reason"] for row in failed] == ["agent_error"]
    assert world.sql("broken", "select count(*) as n from segments") == [{"n": 0}]  # never a reward of 0


def test_stalled_run_names_the_suspect_and_leaves_with_3(world: World, tmp_path: Path):
    agent = tmp_path / "hanging.py"
    agent.write_text(
        "import asyncio\n\nimport molt.agents as agents\n\n\n"
        "class HangingEnv(agents.Env):\n    async def step(self, action):\n        await asyncio.sleep(3600)\n\n\n"
        "class AgentRunner(agents.AgentRunner):\n    env = HangingEnv\n"
    )
    done = world.molt("train", *world.flags("hanging", train__agent_path=agent, train__step_timeout_s=45))
    said = done.stderr + done.stdout
    assert done.returncode == 3 and "train.step_timeout_s=45 passed while waiting for rollouts" in said and "in flight" in said
    (ended,) = world.sql("hanging", "select what, limit_s from wait_ended_badly")
    assert ended == {"what": "rollouts", "limit_s": 45.0}


@pytest.mark.parametrize("estimator", ["gae", "on_policy_distill"])
def test_estimators_with_a_model_beside_the_policy_train_and_replay(world: World, estimator: str):
    teacher = {"reference__model_name_or_path": world.path / "model"} if estimator == "on_policy_distill" else {}
    world.train(estimator, algo__advantage__estimator=estimator, train__num_steps=3, **teacher)
    world.audit(estimator)
    columns = {"gae": "values", "on_policy_distill": "teacher_logprobs"}
    (missing,) = world.sql(estimator, f'select count(*) as n from scores where "{columns[estimator]}" is null')
    assert missing == {"n": 0}
    replayed = world.molt("replay", world.run(estimator))
    assert replayed.returncode == 0, replayed.stdout[-3000:] + replayed.stderr[-3000:]


def test_estimator_of_a_copied_pipeline_reaches_the_ranks(world: World, tmp_path: Path):
    copy = tmp_path / "my_rl.py"
    own = """
from molt.algo.estimators import estimator


@estimator("half_reward")
def half_reward(inputs):
    return inputs.returns(0.5 * inputs.reward_U)
"""
    copy.write_text((ROOT / "pipelines" / "rl.py").read_text() + own)
    flags = world.flags("copied", train__num_steps=2, algo__advantage__estimator="half_reward")
    done = world.molt("train", "--pipeline", str(copy), *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert world.sql("copied", "select count(*) as n from step_trained")[0]["n"] == 2
    world.audit("copied")
