"""The processes of a trainer: ranks that learn, and ranks of a frozen model apart; each does what its group asks, one call at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from molt.admission.plan import StepPlan
from molt.agents.load import load_agent
from molt.algo.estimators import estimator_file, estimator_names, load_estimators
from molt.algo.kl import coefficient_after
from molt.config import Config
from molt.errors import RefitError
from molt.learn import checkpoint, weights
from molt.learn.apart import refuse_leaks
from molt.learn.beside import Beside, Critic, FrozenModel, frozen_path, needs_critic, needs_frozen, vocab_size
from molt.learn.checkpoint import Position
from molt.learn.exchange import places_of
from molt.learn.export import export
from molt.learn.journal import LogJournal, read_rows
from molt.learn.mesh import RankMesh, make_mesh
from molt.learn.model import load_model
from molt.learn.policy import SENT_DTYPES, Policy
from molt.learn.rank import PolicyRank
from molt.learn.result import RecordedStep, StepResult
from molt.learn.rows import micro_batches
from molt.learn.supervised_rank import SupervisedRank
from molt.log.actor import RaySink
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.machine import show_stacks_on_signal
from molt.rollout.engine import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What one rank is told at its start."""

    rank: int
    num_ranks: int
    config: Config
    run_dir: str
    run: str
    attempt: int
    mode: str
    """record or replay."""
    num_steps: int
    """Length of the learning-rate schedule."""
    model_path: str
    objective: str = "policy"
    """policy: learn from rollouts; supervised: learn demonstrations."""
    estimator_file: str | None = None
    """Agent or pipeline file that registers the run's estimator; None for a built-in one."""


class Member:
    """One process of a group: it meets the others over a port that nobody can take in between."""

    def __init__(self, spec: RankSpec) -> None:
        show_stacks_on_signal()
        self.spec = spec
        self.store: dist.TCPStore | None = None
        self.host = "127.0.0.1"
        """This machine, as the other processes of the run reach it; set on rank 0."""

    def listen(self, is_local: bool) -> tuple[str, int]:
        """Rank 0: open the rendezvous on a port that the system picks, and hold it. Returns host and port."""
        self.host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        self.store = dist.TCPStore(self.host, 0, self.spec.num_ranks, is_master=True, wait_for_workers=False)
        return self.host, int(self.store.port)

    def meet(self, place: tuple[str, int]) -> RankMesh:
        """Join the process group; a collective."""
        spec, timeout = self.spec, timedelta(seconds=self.spec.config.train.step_timeout_s)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        set_determinism(spec.config, kind)
        if self.store is None:
            self.store = dist.TCPStore(*place, spec.num_ranks, is_master=False, timeout=timeout)
        if kind == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank its own
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=self.store, rank=spec.rank, world_size=spec.num_ranks, timeout=timeout)
        torch.manual_seed(spec.config.run.seed)
        if spec.estimator_file is not None:
            load_estimators(spec.estimator_file)
        return make_mesh(spec.config.fsdp, kind)

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def stop(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class FrozenProcess(Member):
    """One rank of a reference or teacher that stands apart: it reads the rows of its trainer rank from the log and scores them."""

    def join(self, place: tuple[str, int]) -> str:
        """Meet the other ranks and load the frozen model. Returns the device."""
        mesh = self.meet(place)
        path = frozen_path(self.spec.config, self.spec.model_path)
        self.model = FrozenModel(path, self.spec.config, mesh)
        self.reader = LogReader.open(self.spec.run_dir)
        return str(self.model.device)

    def score(self, plan: StepPlan) -> list[np.ndarray]:
        """Log-probs of the rank's micro-batches; a collective."""
        shard = self.spec.rank // self.spec.config.fsdp.group_size
        places = places_of(plan, shard)
        rows = dict(zip(places, read_rows(self.reader, [plan.segments[p].segment_id for p in places]), strict=True))
        return [column.numpy() for column in self.model.score(micro_batches(plan, shard, rows))]


class RankProcess(Member):
    """One trainer rank. listen and join first; afterwards every call is a collective that all ranks are asked for together."""

    def __init__(self, spec: RankSpec, log: Any | None) -> None:
        super().__init__(spec)
        self.log = log

    def join(self, place: tuple[str, int]) -> str:
        """Meet the other ranks and build the policy and what stands beside it. Returns the device."""
        spec, config, mesh = self.spec, self.spec.config, self.meet(place)
        scorer = load_model(spec.model_path, config.actor, config.fsdp, is_deferred=True)
        vocabulary = vocab_size(scorer)
        passes = config.train.epochs_per_batch
        self.policy = Policy(scorer, config.actor, config.fsdp, mesh=mesh, num_steps=spec.num_steps, updates_per_step=passes)
        if config.fsdp.packing_check:
            of_model = {"path": spec.model_path, "attention": config.fsdp.attn_implementation}
            refuse_leaks(lambda packed: self.policy.score(packed)[0], scorer.lm.config, **of_model)
        is_policy = spec.objective == "policy"
        critic = Critic(config, mesh, actor_path=spec.model_path, num_steps=spec.num_steps) if is_policy and needs_critic(config) else None
        frozen = None
        if is_policy and needs_frozen(config) and config.reference.placement == "colocated":
            frozen = FrozenModel(frozen_path(config, spec.model_path), config, mesh, num_entries=vocabulary)
        self.publisher = weights.Publisher(
            self.policy,
            config.vllm.weight_transfer,
            gpus_per_engine=config.vllm.tensor_parallel_size * config.vllm.data_parallel_size,
            host=self.host,
            limit_s=config.vllm.refit_timeout_s,
        )
        self.policies = {"actor": self.policy} | ({} if critic is None else {"critic": critic.policy})
        producer = None
        if spec.mode == "record":
            producer = Producer(RaySink(self.log), name=f"rank-{spec.rank}-attempt-{spec.attempt}")
        self.journal = LogJournal(config, LogReader.open(spec.run_dir), producer)
        kind = SupervisedRank if spec.objective == "supervised" else PolicyRank
        self.ranked = kind(config, self.policy, self.journal, rank=spec.rank, beside=Beside(critic=critic, frozen=frozen))
        return str(self.policy.device)

    def expect(self, plan: StepPlan) -> None:
        """Begin to read the rows of a step that comes next."""
        self.journal.expect([plan.segments[place].segment_id for place in places_of(plan, self.ranked.rank)])

    def train(
        self, plan: StepPlan, recorded: RecordedStep | None, waits_for_log: bool, frozen: list[np.ndarray] | None = None
    ) -> StepResult | None:
        """One step; rank 0 returns the result."""
        result = self.ranked.train(plan, recorded, frozen, waits_for_log=waits_for_log)
        if self.spec.config.vllm.sleep_level and torch.cuda.is_available():
            torch.cuda.empty_cache()  # engines that slept meanwhile take their memory back now
        return result if self.spec.rank == 0 else None

    def release(self) -> None:
        """Begin to write down what the newest step computed."""
        self.ranked.release()

    def settle(self) -> None:
        """Return once what the newest step wrote is in the log."""
        self.ranked.settle()

    def evaluate(self, plan: StepPlan) -> float:
        """Mean negative log-prob over the targets of a plan, for supervised ranks."""
        assert isinstance(self.ranked, SupervisedRank), "only supervised ranks evaluate a plan"
        return self.ranked.evaluate(plan)

    def publish(self, version: int, folder: str, engines: list[str]) -> WeightSource | None:
        """Make the weights ready for engines; rank 0 returns where."""
        return self.publisher.publish(version, Path(folder), engines)

    def publish_again(self, engines: list[str]) -> WeightSource:
        """Rank 0 alone: make the last version ready for a broadcast to these engines."""
        return self.publisher.publish_again(engines)

    def send(self) -> str | None:
        """Broadcast what was published last to engines that are receiving; a collective. Rank 0 returns why it broke off."""
        try:
            self.publisher.send()
        except RefitError as error:
            return str(error)
        return None

    def weights_digest(self) -> str:
        """Model digest over the weights as they are sent."""
        return weights.sent_digest(self.policy)

    def save(self, root: str, step: int, policy_version: int, cursor: int, lsn_end: int, keep: int) -> tuple[str, str]:
        """Write a checkpoint; returns its folder and the weights' digest."""
        digest = weights.sent_digest(self.policy)
        position = Position(
            step=step,
            policy_version=policy_version,
            cursor=cursor,
            lsn_end=lsn_end,
            weights_digest=digest,
            num_updates={name: policy.num_updates for name, policy in self.policies.items()},
            kl_coef=None if self.spec.config.algo.kl.target is None else self.ranked.kl_coef,
        )
        folder = checkpoint.save(Path(root), self.policies, position)
        if self.spec.rank == 0:
            checkpoint.keep_newest(Path(root), keep, folder)
        return str(folder), digest

    def newest(self, root: str) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and in words those passed over; a collective."""
        return checkpoint.newest(Path(root))

    def load(self, folder: str) -> Position:
        """Take up a checkpoint; returns its position."""
        position = checkpoint.load(Path(folder), self.policies)
        self.ranked.kl_coef = coefficient_after(self.spec.config.algo.kl, position.kl_coef)
        return position

    def export(self, target: str) -> str:
        """Write a Hugging Face folder; returns it."""
        tensors = weights.sent_tensors(self.policy)
        if self.spec.rank == 0:
            dtype = SENT_DTYPES[self.spec.config.actor.dtype]
            config = self.policy.scorer.lm.config.to_dict()
            export(tensors, config, source=Path(self.spec.model_path), target=Path(target), dtype=dtype)
        dist.barrier()
        return target


def find_estimator(config: Config) -> str | None:
    """The file that registers the run's estimator, for the ranks to load: the agent's, or the pipeline that runs here. None: built in."""
    name = config.algo.advantage.estimator
    if name not in estimator_names() and config.train.agent_path is not None:
        load_agent(config.train.agent_path)
    return estimator_file(name)


def set_determinism(config: Config, kind: str) -> None:
    """One thread on the CPU, so that sums have one order; deterministic GPU kernels where asked (the group sets cuBLAS' variable)."""
    if kind == "cpu":
        torch.set_num_threads(1)
    elif config.train.deterministic:
        torch.use_deterministic_algorithms(True)
