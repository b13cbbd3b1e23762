"""Every layout of four ranks makes the steps of one rank: losses, gradient norms, weights, checkpoints, with and without experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from molt.learn.beside import Beside, Critic, FrozenModel
from molt.learn.checkpoint import Position, load, save
from molt.learn.mesh import make_mesh
from molt.learn.rank import PolicyRank
from molt.learn.result import StepResult
from molt.learn.rows import Row
from molt.learn.weights import digests, sent_digest, sent_tensors, stream
from molt.rollout.weights import facts_of, model_digest
from tests.groups import leave_group
from tests.learn import automodel_shim
from tests.learn.tiny import make_config, make_model, make_moe, make_plan, make_rank, make_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # NeMo AutoModel warns at import about kernels that are not there
]
NUM_STEPS = 2
LEARNING_RATE = 1e-3
WHOLE = {"reshard_after_forward": False, "defer_grad_sync": True}
"""Weights are gathered, and gradients summed, once a step."""
DENSE: dict[str, dict[str, int]] = {
    "tp2": {"num_ranks": 2, "tp_size": 2},
    "cp2": {"num_ranks": 2, "cp_size": 2},
    "tp2 x cp2": {"num_ranks": 4, "tp_size": 2, "cp_size": 2},
    "tp2 x 2 shards": {"num_ranks": 4, "tp_size": 2},
    "cp2 x 2 shards": {"num_ranks": 4, "cp_size": 2},
    "2 replicas of 2": {"num_ranks": 4, "replicas": 2},
    "2 replicas of tp2": {"num_ranks": 4, "replicas": 2, "tp_size": 2},
    "cp4": {"num_ranks": 4, "cp_size": 4},
    "tp2 x 2 shards, held whole": {"num_ranks": 4, "tp_size": 2} | WHOLE,
    "2 replicas of 2, held whole": {"num_ranks": 4, "replicas": 2} | WHOLE,
}
MOE = {
    "tp2 x 2 shards": DENSE["tp2 x 2 shards"],
    "tp2 x cp2": DENSE["tp2 x cp2"],
    "cp4": DENSE["cp4"],
    "ep2 x 2 shards": {"num_ranks": 4, "ep_size": 2},
    "ep4": {"num_ranks": 4, "ep_size": 4},
    "ep2 x cp2": {"num_ranks": 4, "ep_size": 2, "cp_size": 2},
    "ep2 over 2 replicas": {"num_ranks": 4, "ep_size": 2, "replicas": 2},
    "ep2 x 2 shards, held whole": {"num_ranks": 4, "ep_size": 2} | WHOLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one layout made."""

    results: list[StepResult]
    weights: dict[str, torch.Tensor]
    """As they are sent, after the last step."""
    digest: str
    reloaded: str
    """Digest after a checkpoint of another layout was loaded."""


def routed_rows() -> list[Row]:
    """Rows whose engine chose experts, all but those of the last tokens."""
    generator = np.random.default_rng(5)
    rows = []
    for row in make_rows(7):
        routes = np.stack([[generator.permutation(8)[:2] for _ in range(2)] for _ in row.token_ids]).astype(np.int16)
        routes[-2:] = -1
        rows.append(replace(row, routes=routes))
    return rows


def train(model: Path, fsdp: dict[str, int], *, is_replayed: bool, folder: Path, name: str, loads: Path | None) -> Outcome:
    """Two steps in this process group, a checkpoint after them, then the one of another layout."""
    actor = {"learning_rate": LEARNING_RATE, "implementation": "automodel" if "ep_size" in fsdp else "hf"}
    # Layouts with slices compute activations again in the backward pass, collectives and replayed routes included; the others keep them.
    rooms: dict[str, Any] = {"actor": actor | {"gradient_checkpointing": "cp_size" in fsdp}}
    rooms["train"] = {"micro_batch_tokens": 32, "routing_replay": is_replayed}
    config = make_config(model, fsdp=fsdp, **rooms)
    rows = routed_rows() if is_replayed else make_rows(7)
    worker = make_rank(config, rows)
    plans = [make_plan(rows, step=step, num_ranks=config.fsdp.num_shards, micro_batch_tokens=32) for step in range(NUM_STEPS)]
    results = [worker.train(plan) for plan in plans]
    digest = sent_digest(worker.policy)
    position = Position(step=NUM_STEPS, policy_version=2, cursor=7, lsn_end=7, weights_digest=digest, num_updates={"actor": NUM_STEPS})
    save(folder / name, {"actor": worker.policy}, position)
    weights, shards = sent_tensors(worker.policy), worker.policy.shards(torch.float32)
    if loads is not None:
        load(loads, {"actor": worker.policy})
        again = facts_of(stream(worker.policy, shards=shards))  # what a broadcast sends, though the weights have changed since
        assert dist.get_rank() > 0 or model_digest(digests(again)) == digest
    written = worker.journal.written  # type: ignore[attr-defined]
    assert len(written) == (NUM_STEPS if dist.get_rank() % config.fsdp.group_size == 0 else 0)
    return Outcome(results=results, weights=weights, digest=digest, reloaded=sent_digest(worker.policy))


def train_beside(model: Path, fsdp: dict[str, int]) -> list[StepResult]:
    """Two steps with a critic that learns and a reference that holds back, in this process group."""
    algo = {"advantage": {"estimator": "gae", "lambd": 0.95}, "kl": {"coef": 0.1}}
    config = make_config(model, fsdp=fsdp, algo=algo, actor={"learning_rate": LEARNING_RATE, "implementation": "hf"})
    rows, path, mesh = make_rows(7), str(model), make_mesh(config.fsdp, "cpu")
    rank = make_rank(config, rows)
    beside = Beside(critic=Critic(config, mesh, actor_path=path, num_steps=10), frozen=FrozenModel(path, config, mesh))
    worker = PolicyRank(config, rank.policy, rank.journal, rank=dist.get_rank(), beside=beside)
    return [worker.train(make_plan(rows, step=step, num_ranks=config.fsdp.num_shards, micro_batch_tokens=32)) for step in range(NUM_STEPS)]


def _process_beside(rank: int, size: int, folder: str, model: str, fsdp: dict[str, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/beside{size}", size), rank=rank, world_size=size)
    results = train_beside(Path(model), fsdp)
    if rank == 0:
        torch.save(results, f"{folder}/results{size}")
    leave_group()


def _process(rank: int, size: int, folder: str, model: str, layouts: dict[str, dict[str, int]], is_replayed: bool) -> None:
    """One rank of all layouts of a size, one after another; each loads the checkpoint of the one before."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{size}", size), rank=rank, world_size=size)
    if any("ep_size" in fsdp for fsdp in layouts.values()):
        automodel_shim.install(pytest.MonkeyPatch())
    found: dict[str, Outcome] = {}
    last: tuple[bool, Path] | None = None
    for name, fsdp in layouts.items():
        is_automodel = "ep_size" in fsdp
        loads = last[1] if last is not None and last[0] == is_automodel else None
        found[name] = train(Path(model), fsdp, is_replayed=is_replayed, folder=Path(folder), name=name, loads=loads)
        last = (is_automodel, Path(folder) / name / f"step-{NUM_STEPS:08d}")
    if rank == 0:
        torch.save(found, f"{folder}/found{size}")
    leave_group()


def run(folder: Path, model: Path, layouts: dict[str, dict[str, int]], *, is_replayed: bool) -> dict[str, Outcome]:
    """The layouts by name, and one rank alone under the name alone."""
    found: dict[str, Outcome] = {}
    for size in (1, 2, 4):
        of_size = {name: fsdp for name, fsdp in ({"alone": {"num_ranks": 1}} | layouts).items() if fsdp["num_ranks"] == size}
        if of_size:
            mp.spawn(_process, (size, str(folder), str(model), of_size, is_replayed), nprocs=size)
            found |= torch.load(folder / f"found{size}", weights_only=False)
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("dense")
    return run(folder, make_model(folder / "model", num_entries=98), DENSE, is_replayed=False)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    if find_spec("nemo_automodel") is None:
        pytest.skip("nemo-automodel is not installed")
    folder = tmp_path_factory.mktemp("moe")
    return run(folder, make_moe(folder / "model", num_entries=98), MOE, is_replayed=True)


def check_steps(one: Outcome, other: Outcome) -> None:
    """Loss, gradient norm and counts of each step."""
    for a, b in zip(one.results, other.results, strict=True):
        assert a.refused is None and b.refused is None
        assert a.batch_digest == b.batch_digest  # the same ids, masks and advantages, bit for bit
        # The loss is a sum of about 50 float32 terms of size 1e-2 in another order: 1e-6 is a hundred roundings.
        assert abs(a.loss - b.loss) < 1e-6
        assert abs(a.grad_norm - b.grad_norm) < 1e-5 * a.grad_norm
        assert a.n_kept == b.n_kept and [use.segment_id for use in a.uses] == [use.segment_id for use in b.uses]
        assert a.metrics.get("replayed_share") == b.metrics.get("replayed_share")  # padding of slices and dummies counts as no token
        if "expert_agreement_mean" in a.metrics:
            # A choice between two experts of nearly equal score may fall otherwise: one of 2 of about 75 tokens in one of 2 layers.
            assert abs(a.metrics["expert_agreement_mean"] - b.metrics["expert_agreement_mean"]) < 0.01


def check_weights(one: Outcome, other: Outcome) -> None:
    """AdamW moves a weight by the learning rate whatever its gradient's size, so one whose gradient is rounding noise may go either way."""
    assert one.weights.keys() == other.weights.keys()
    gaps = torch.cat([(one.weights[name] - other.weights[name]).abs().flatten() for name in one.weights])
    assert float(gaps.median()) < 1e-7
    assert float((gaps > 1e-5).float().mean()) < 0.01
    assert float(gaps.max()) <= 2.1 * NUM_STEPS * LEARNING_RATE


@pytest.mark.parametrize("name", DENSE)
def test_layout_of_a_dense_model_makes_the_steps_of_one_rank(dense: dict[str, Outcome], name: str) -> None:
    check_steps(dense["alone"], dense[name])
    check_weights(dense["alone"], dense[name])


@pytest.mark.parametrize("name", MOE)
def test_layout_with_experts_and_replayed_routes_makes_the_steps_of_one_rank(moe: dict[str, Outcome], name: str) -> None:
    check_steps(moe["alone"], moe[name])
    check_weights(moe["alone"], moe[name])


def test_critic_and_reference_share_the_layout_of_the_policy(tmp_path: Path) -> None:
    model, found = make_model(tmp_path / "model", num_entries=98), []
    for size, fsdp in ((1, {"num_ranks": 1}), (4, DENSE["tp2 x cp2"] | WHOLE)):
        mp.spawn(_process_beside, (size, str(tmp_path), str(model), fsdp), nprocs=size)
        found.append(torch.load(tmp_path / f"results{size}", weights_only=False))
    for one, other in zip(*found, strict=True):
        assert one.refused is None and other.refused is None and abs(one.loss - other.loss) < 1e-6
        for name in ("critic_loss", "critic_grad_norm", "reference_kl_mean", "explained_variance"):
            assert (name in one.metrics) == (name in other.metrics)
            assert one.metrics.get(name, 0.0) == pytest.approx(other.metrics.get(name, 0.0), rel=1e-4, abs=1e-7)


def test_checkpoint_of_one_layout_loads_under_another(dense: dict[str, Outcome], moe: dict[str, Outcome]) -> None:
    for found, names in ((dense, [n for n in DENSE if DENSE[n]["num_ranks"] == 4]), (moe, list(MOE))):
        for before, name in pairwise(names):
            if ("ep_size" in (MOE | DENSE)[before]) == ("ep_size" in (MOE | DENSE)[name]):
                assert found[name].reloaded == found[before].digest
