"""The process of one trainer rank: joins its group, builds the policy, and does what the group asks, one call at a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from molt.admission.plan import StepPlan
from molt.config import Config
from molt.learn import checkpoint, weights
from molt.learn.checkpoint import Position
from molt.learn.export import export
from molt.learn.journal import LogJournal
from molt.learn.model import load_model
from molt.learn.policy import SENT_DTYPES, Policy
from molt.learn.rank import PolicyRank
from molt.learn.result import RecordedStep, StepResult
from molt.log.actor import RaySink
from molt.log.producer import Producer
from molt.log.reader import LogReader
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


class RankProcess:
    """One rank. listen and join first; afterwards every call is a collective that all ranks are asked for together."""

    def __init__(self, spec: RankSpec, log: Any | None) -> None:
        self.spec = spec
        self.log = log
        self.store: dist.TCPStore | None = None

    def listen(self) -> int:
        """Rank 0: open the rendezvous on a port that the system picks, and hold it. Returns the port."""
        self.store = dist.TCPStore("127.0.0.1", 0, self.spec.num_ranks, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def join(self, port: int) -> str:
        """Meet the other ranks and build the policy. Returns the device."""
        spec, timeout = self.spec, timedelta(seconds=self.spec.config.train.step_timeout_s)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        set_determinism(spec.config, kind)
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", port, spec.num_ranks, is_master=False, timeout=timeout)
        if kind == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank its own
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=self.store, rank=spec.rank, world_size=spec.num_ranks, timeout=timeout)
        torch.manual_seed(spec.config.run.seed)
        mesh = init_device_mesh(kind, (spec.num_ranks,))
        scorer = load_model(spec.model_path, spec.config.actor, spec.config.fsdp)
        self.policy = Policy(scorer, spec.config.actor, spec.config.fsdp, mesh=mesh, num_steps=spec.num_steps)
        producer = None
        if spec.mode == "record":
            producer = Producer(RaySink(self.log), name=f"rank-{spec.rank}-attempt-{spec.attempt}")
        journal = LogJournal(spec.config, LogReader.open(spec.run_dir), producer)
        self.ranked = PolicyRank(spec.config, self.policy, journal, rank=spec.rank)
        return str(self.policy.device)

    def train(self, plan: StepPlan, recorded: RecordedStep | None) -> StepResult | None:
        """One step; rank 0 returns the result."""
        result = self.ranked.train(plan, recorded)
        return result if self.spec.rank == 0 else None

    def publish(self, version: int, folder: str) -> WeightSource | None:
        """Write the weights for engines of this host; rank 0 returns where."""
        return weights.publish(self.policy, version, Path(folder))

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
            num_updates={"actor": self.policy.num_updates},
        )
        folder = checkpoint.save(Path(root), {"actor": self.policy}, position)
        if self.spec.rank == 0:
            checkpoint.keep_newest(Path(root), keep)
        return str(folder), digest

    def load(self, folder: str) -> Position:
        """Take up a checkpoint; returns its position."""
        return checkpoint.load(Path(folder), {"actor": self.policy})

    def export(self, target: str) -> str:
        """Write a Hugging Face folder; returns it."""
        tensors = weights.sent_tensors(self.policy)
        if self.spec.rank == 0:
            dtype = SENT_DTYPES[self.spec.config.actor.dtype]
            config = self.policy.scorer.lm.config.to_dict()
            export(tensors, config, source=Path(self.spec.model_path), target=Path(target), dtype=dtype)
        dist.barrier()
        return target

    def stop(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def set_determinism(config: Config, kind: str) -> None:
    """One thread on the CPU, so that sums have one order; deterministic kernels on the GPU where asked (the group sets cuBLAS' variable)."""
    if kind == "cpu":
        torch.set_num_threads(1)
    elif config.train.deterministic:
        torch.use_deterministic_algorithms(True)
