"""Models beside the policy: a critic that learns, a teacher that is followed, a reference that holds back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from molt.config import Config, FsdpSettings
from molt.errors import SettingError
from molt.learn.beside import Beside, Critic, FrozenModel, frozen_path, needs_critic, needs_frozen
from molt.learn.checkpoint import Position, load, save
from molt.learn.mesh import make_mesh
from molt.learn.rank import PolicyRank
from tests.learn.tiny import make_config, make_model, make_plan, make_rank, make_rows


def with_beside(rank: PolicyRank, config: Config) -> PolicyRank:
    mesh = make_mesh(FsdpSettings(num_ranks=dist.get_world_size()), "cpu")
    path = config.actor.model_name_or_path or ""
    critic = Critic(config, mesh, actor_path=path, num_steps=10) if needs_critic(config) else None
    frozen = FrozenModel(frozen_path(config, path), config, mesh) if needs_frozen(config) else None
    return PolicyRank(config, rank.policy, rank.journal, rank=0, beside=Beside(critic=critic, frozen=frozen))


def gae_config(model: Path, **critic: object) -> Config:
    return make_config(model, algo={"advantage": {"estimator": "gae", "lambd": 0.95}}, critic={"learning_rate": 1e-2} | critic)


def test_critic_learns_the_returns_and_the_actor_follows(model: Path) -> None:
    rows, config = make_rows(6), gae_config(model)
    rank = with_beside(make_rank(config, rows), config)
    results = [rank.train(make_plan(rows, step=step)) for step in range(8)]
    assert all(r.refused is None for r in results)
    assert results[-1].metrics["critic_loss"] < 0.5 * results[0].metrics["critic_loss"]
    assert results[-1].metrics["explained_variance"] > results[0].metrics["explained_variance"]
    # Values begin at 0 and rewards are 1 or 0 at the last token: with gamma 1 and values 0, lambda 0.95 gives A = 0.95^k R.
    first = rank.journal.written[0]
    assert all(float(values.abs().max()) == 0 for values in first.columns.values)


def test_rollouts_without_a_reward_are_no_targets_of_the_critic(model: Path) -> None:
    rows, config = make_rows(4), make_config(model, algo={"advantage": {"estimator": "gae"}}, critic={"learning_rate": 1e-2})
    rank = with_beside(make_rank(config, rows), config)
    result = rank.train(make_plan(rows, rewards=[1.0, 0.0, None, None]))
    # Values are 0, returns 1 at n tokens and 0 at m: squared error p = n / (n + m), variance p (1 - p), so 1 - 1 / (1 - p) = -n / m.
    n, m = (int(row.is_sampled.sum()) for row in rows[:2])
    assert result.metrics["explained_variance"] == pytest.approx(-n / m, rel=1e-6)


def test_actor_stands_still_while_the_critic_warms_up(model: Path) -> None:
    rows, config = make_rows(4), gae_config(model, warmup_steps=2)
    rank = with_beside(make_rank(config, rows), config)
    before = {name: t.clone() for name, t in rank.policy.full_tensors().items()}
    results = [rank.train(make_plan(rows, step=step)) for step in range(2)]
    assert all(torch.equal(before[name], t) for name, t in rank.policy.full_tensors().items())
    assert rank.policy.num_updates == 0 and rank.beside.critic is not None and rank.beside.critic.policy.num_updates == 2
    assert all(r.metrics["is_actor_frozen"] == 1 and r.refused is None for r in results)
    rank.train(make_plan(rows, step=2))
    assert rank.policy.num_updates == 1


def test_critic_comes_back_from_a_checkpoint_bit_for_bit(model: Path, tmp_path: Path) -> None:
    rows, config = make_rows(4), gae_config(model)
    straight, resumed = (with_beside(make_rank(config, rows), config) for _ in range(2))
    straight.train(make_plan(rows))
    policies = [{"actor": r.policy, "critic": r.beside.critic.policy} for r in (straight, resumed) if r.beside.critic]
    position = Position(step=1, policy_version=1, cursor=0, lsn_end=0, weights_digest="", num_updates={"actor": 1, "critic": 1})
    load(save(tmp_path, policies[0], position), policies[1])
    a, b = (r.train(make_plan(rows, step=1)) for r in (straight, resumed))
    assert a.weights_digest == b.weights_digest
    assert a.metrics["critic_loss"] == b.metrics["critic_loss"]
    assert a.batch_digest == b.batch_digest


def test_student_approaches_its_teacher(model: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "teacher", seed=1)
    config = make_config(model, algo={"advantage": {"estimator": "on_policy_distill"}}, reference={"model_name_or_path": str(teacher)})
    rows = [replace(row) for row in make_rows(6)]
    rank = with_beside(make_rank(config, rows), config)
    gaps = []
    for step in range(6):
        result = rank.train(make_plan(rows, step=step, rewards=[0.0] * 6))
        assert result.refused is None
        columns = rank.journal.written[-1].columns
        student, theirs = torch.cat(columns.logprobs), torch.cat(columns.teacher)
        gaps.append(float(((student - theirs) * (theirs > student)).abs().sum()))
    assert gaps[-1] < gaps[0]  # tokens that the teacher likes better have come closer


def test_reference_holds_the_policy_back(model: Path) -> None:
    rows = make_rows(6)
    drift = []
    for coefficient in (0.0, 10.0):
        config = make_config(model, algo={"advantage": {"estimator": "grpo"}, "kl": {"coef": coefficient, "estimator": "k2"}})
        rank = with_beside(make_rank(config, rows), config)
        for step in range(6):
            rank.train(make_plan(rows, step=step))
        columns = rank.journal.written[-1].columns
        start = rank.journal.written[0].columns.logprobs
        drift.append(float((torch.cat(columns.logprobs) - torch.cat(start)).square().mean()))
        assert not columns.reference or torch.equal(torch.cat(columns.reference), torch.cat(start))  # it is the initial policy
    assert drift[1] < 0.5 * drift[0]


def test_adaptive_coefficient_grows_while_the_divergence_is_too_large(model: Path) -> None:
    rows = make_rows(4)
    kl = {"coef": 0.1, "estimator": "k2", "target": 1e-6, "horizon": 100}
    config = make_config(model, algo={"advantage": {"estimator": "grpo"}, "kl": kl})
    rank = with_beside(make_rank(config, rows), config)
    coefficients = [rank.train(make_plan(rows, step=step)).metrics["kl_coef"] for step in range(4)]
    # step 0 measures 0: factor 1 - 0.2 * 4 / 100; later steps measure far more than the target: factor 1 + 0.2 * 4 / 100
    assert coefficients[0] == 0.1
    assert coefficients[1] == pytest.approx(0.1 * 0.992)
    assert coefficients[3] == pytest.approx(0.1 * 0.992 * 1.008**2)


def test_teacher_must_be_named_and_share_the_vocabulary(model: Path, tmp_path: Path) -> None:
    config = make_config(model, algo={"advantage": {"estimator": "on_policy_distill"}})
    with pytest.raises(SettingError, match="needs a teacher"):
        frozen_path(config, str(model))
    with pytest.raises(SettingError, match="vocabulary has 97 entries"):
        FrozenModel(str(model), config, make_mesh(FsdpSettings(), "cpu"), num_entries=98)


def test_divergence_as_reward_enters_the_advantages_once_the_policy_has_moved(model: Path) -> None:
    rows, digests = make_rows(6), []
    for coefficient in (0.0, 0.5):
        kl = {"coef": coefficient, "estimator": "k1", "use": "reward"} if coefficient else {}
        config = make_config(model, algo={"advantage": {"estimator": "reinforce", "whiten": False}, "kl": kl})
        rank = with_beside(make_rank(config, rows), config)
        results = [rank.train(make_plan(rows, step=step)) for step in range(2)]
        assert all(r.refused is None for r in results)
        digests.append([r.batch_digest for r in results])
    # the policy begins as its reference: at step 0 the divergence is exactly 0, and -0.5 * 0 changes no advantage
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]
