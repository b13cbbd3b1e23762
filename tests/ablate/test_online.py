"""Online equals offline: what the trainer's rank wrote into the log is computed again from the log, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from molt.ablate.gradients import compare_gradients
from molt.ablate.recompute import compare_run, compare_step
from molt.ablate.record import ScoredRun
from molt.ablate.variants import baseline_of, parse_grid
from molt.admission.plan import plan_digest, plan_to_json
from molt.config import FsdpSettings
from molt.learn.beside import Beside, Critic, FrozenModel, needs_critic, needs_frozen
from molt.learn.journal import LogJournal
from molt.learn.mesh import make_mesh
from molt.learn.rank import PolicyRank
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import event
from molt.log.writer import LogWriter
from tests.learn.tiny import make_config, make_model, make_plan, make_rank, make_rows, to_segments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("teacher"), seed=1)


def needs_frozen_model(algo: dict) -> bool:
    return "kl" in algo or algo["advantage"]["estimator"] == "on_policy_distill"


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    is_mine = not dist.is_initialized()
    if is_mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if is_mine:
        dist.destroy_process_group()


def train(
    where: Path, model: Path, algo: dict, num_steps: int = 3, teacher: Path | None = None, *, attempt: int = 1, first_step: int = 0
) -> ScoredRun:
    """Real steps of a real rank over a real log; the made-up behaviour log-probs differ from the model's by a nat or so."""
    rows = make_rows(8)
    config = make_config(model, algo=algo, reference={"model_name_or_path": None if teacher is None else str(teacher)})
    writer = LogWriter.open(where, run="run", attempt=attempt, store="process")
    producer = Producer(writer, f"test-{attempt}")
    started = event(
        "attempt_started", config=config.model_dump_json(), config_digest="", code_digest="", packages="{}", hardware="{}", seed=0,
        model_digest="", num_steps=num_steps, pid=0, host="", resumed_from_step=first_step if attempt > 1 else None,
    )  # fmt: skip
    producer.append_sync(segments=to_segments(rows) if attempt == 1 else [], events=[started])
    rank = make_rank(config, rows, num_steps=num_steps)
    mesh = make_mesh(FsdpSettings(num_ranks=dist.get_world_size()), "cpu")
    critic = Critic(config, mesh, actor_path=str(model), num_steps=num_steps) if needs_critic(config) else None
    frozen = FrozenModel(config.reference.model_name_or_path or str(model), config, mesh) if needs_frozen(config) else None
    rank = PolicyRank(config, rank.policy, rank.journal, rank=0, beside=Beside(critic=critic, frozen=frozen))
    rank.journal = LogJournal(config, LogReader.open(where), producer)
    for step in range(first_step, num_steps):
        plan = replace(make_plan(rows, step=step, micro_batch_tokens=40), policy_version=0)
        text = plan_to_json(plan)
        planned = event(
            "batch_planned", step=step, policy_version=0, plan=text, plan_digest=plan_digest(text), groups=[], num_segments=8,
            num_rollouts=8, n_sampled=plan.n_sampled, seed=0, cursor=0,
        )  # fmt: skip
        producer.append_sync(events=[planned])
        result = rank.train(plan)
        assert result.refused is None, result.refused
        trained = event(
            "step_trained", step=step, policy_version=0, loss=result.loss, grad_norm=result.grad_norm, learning_rate=0.0,
            n_sampled=plan.n_sampled, n_kept=result.n_kept, batch_digest=result.batch_digest, loss_digest=result.loss_digest,
            metrics=json.dumps(result.metrics), train_s=0.0, log_s=0.0, wait_s=0.0,
        )  # fmt: skip
        producer.append_sync(events=[trained])
    writer.close()
    return ScoredRun.open(where)


@pytest.mark.parametrize(
    "algo",
    [
        {"advantage": {"estimator": "grpo"}},
        {"advantage": {"estimator": "reinforce", "gamma": 0.9, "is_correction_level": "token", "is_correction_threshold": (0.1, 9.0)}},
        {
            "advantage": {"estimator": "rloo", "is_correction_level": "seq", "is_correction_mode": "clip"},
            "loss": {"aggregation": "prompt-mean-token-mean"},
        },
        {
            "advantage": {"estimator": "flash_reinforce", "is_correction_level": "geo", "is_correction_mode": "trunc"},
            "loss": {"name": "gspo", "aggregation": "seq-mean-token-mean"},
        },
        {"advantage": {"estimator": "reinforce_baseline", "is_correction_level": "token", "gate": "tv"}, "loss": {"name": "cispo"}},
        {"advantage": {"estimator": "gae", "gamma": 0.99, "lambd": 0.9}, "loss": {"dual_clip": 3.0}},
        {"advantage": {"estimator": "on_policy_distill"}},
        {"advantage": {"estimator": "rloo"}, "kl": {"coef": 0.1, "use": "reward", "estimator": "k1"}},
        {"advantage": {"estimator": "dr_grpo"}, "kl": {"coef": 0.1, "use": "loss", "target": 0.001, "horizon": 8}},
    ],
)
def test_advantages_gates_and_losses_are_equal_bit_for_bit(tmp_path: Path, model: Path, teacher: Path, algo: dict) -> None:
    found = compare_run(train(tmp_path / "run", model, algo, teacher=teacher if needs_frozen_model(algo) else None))
    assert len(found) == 3
    for step in found:
        assert (step.n_advantages_differ, step.n_weights_differ, step.is_loss_equal) == (0, 0, True)


def test_each_step_is_computed_under_the_settings_of_its_attempt(tmp_path: Path, model: Path) -> None:
    """A run that goes on with another gate and estimator: its first step stays what it was."""
    train(tmp_path / "run", model, {"advantage": {"estimator": "grpo", "is_correction_level": "token", "is_correction_mode": "clip"}}, 2)
    other = {"advantage": {"estimator": "rloo", "is_correction_level": "geo", "is_correction_mode": "trunc"}}
    run = train(tmp_path / "run", model, other, attempt=2, first_step=1)
    assert [run.config_of(step).algo.advantage.estimator for step in range(3)] == ["grpo", "rloo", "rloo"]
    assert [step.is_equal for step in compare_run(run)] == [True] * 3


def test_a_changed_log_prob_is_found(tmp_path: Path, model: Path) -> None:
    run = train(
        tmp_path / "run", model, {"advantage": {"estimator": "grpo", "is_correction_level": "token", "is_correction_mode": "clip"}}, 1
    )
    step = next(run.steps())
    changed = step.trainer_logprobs_T.clone()
    changed[0] = float(step.behaviour_logprobs_T[0]) + 0.1
    again = compare_step(replace(step, trainer_logprobs_T=changed), run.config, recorded=run.outcomes[0])
    assert again.n_weights_differ == 1 and again.is_loss_equal is False and not again.is_equal


def test_gradients_of_like_variants_point_the_same_way(tmp_path: Path, model: Path) -> None:
    run = train(tmp_path / "run", model, {"advantage": {"estimator": "grpo"}})
    grid = parse_grid(["dr_grpo", "rloo", "reinforce"], ["off", "token/clip"], [], ["token-mean"])
    found = compare_gradients(run, grid, baseline_of(grid, None), model=str(model), num_steps=1)["variants"]
    # groups of two: rloo is twice dr_grpo, so its gradient has the same direction and the same relative noise
    assert found["dr_grpo+off+token-mean"]["cosine"] == pytest.approx(1.0)
    assert found["rloo+off+token-mean"]["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert found["rloo+off+token-mean"]["norm"] == pytest.approx(2 * found["dr_grpo+off+token-mean"]["norm"], rel=1e-4)
    assert found["rloo+off+token-mean"]["noise"] == pytest.approx(found["dr_grpo+off+token-mean"]["noise"], rel=1e-3)
    assert -1 <= found["reinforce+token/clip+token-mean"]["cosine"] < 1.0
