"""The trainer as one thing: a group of rank processes under Ray that are always asked together.

driver --train(plan)--> every rank (each reads its data shard's rows, they meet in collectives) --> the result of rank 0
  |  waits at most train.step_timeout_s; the first rank that fails ends the group, since the others wait for it in vain
  |--publish_weights(version)--> shared memory, where engines read; the version before the last is removed then
  `--save / load / export / weights_digest / stop
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from molt.admission.plan import StepPlan
from molt.config import Config
from molt.errors import MoltError, RefitError, ReplayMismatchError, SettingError, StalledError
from molt.learn.checkpoint import Position
from molt.learn.result import RecordedStep, StepResult
from molt.placement import Seat, Seats
from molt.rollout.engine import WeightSource
from molt.rollout.weights import SHARED_MEMORY, model_digest, remove_weights, weights_folder

STOP_TIMEOUT_S = 10.0
CAUSE_TIMEOUT_S = 5.0
CHECKPOINTS = "checkpoints"
LOG_GROUP = "log"
"""Threads of a rank's process that wait for the log."""


class RankGroup:
    """Trainer ranks of one run. Make it with start; a group that raised is finished and can only be stopped."""

    def __init__(self, config: Config, run_dir: Path, run: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.run = run
        self.devices: list[str] = []
        """Device of each rank."""
        self._actors: list[Any] = []
        self._frozen: list[Any] = []
        self._published: list[WeightSource] = []
        self._cause: BaseException | None = None
        """What ended the group: the answer to whoever else waits for it then, or asks it afterwards."""

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        run_dir: str | Path,
        run: str,
        attempt: int = 1,
        log: Any | None = None,
        mode: str = "record",
        num_steps: int | None = None,
        model_path: str | None = None,
        seats: Seats | None = None,
        objective: str = "policy",
    ) -> RankGroup:
        """Start fsdp.num_ranks processes and build the policy on them.

        log: handle of the log actor, needed in mode record. num_steps: length of the schedule, train.num_steps when absent.
        model_path: in place of actor.model_name_or_path. seats: places on the GPUs of the run; one GPU for each rank when absent.
        objective: policy learns from rollouts, supervised from demonstrations.
        """
        import ray

        from molt.learn.beside import needs_frozen
        from molt.learn.rank_actor import FrozenProcess, RankProcess, RankSpec, find_estimator

        path = model_path or config.actor.model_name_or_path
        if path is None:
            raise SettingError("actor.model_name_or_path is missing; give a folder with a Hugging Face model and its tokenizer")
        if mode == "record" and log is None:
            raise SettingError("mode=record needs the log actor; give log=start_log_actor(...)")
        estimator = find_estimator(config)
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
        environment: dict[str, Any] = {}
        if gpus and config.train.deterministic:
            environment = {"env_vars": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}
        remote = ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0, runtime_env=environment, concurrency_groups={LOG_GROUP: 1})
        specs = [
            RankSpec(
                rank=rank,
                num_ranks=config.fsdp.num_ranks,
                config=config,
                run_dir=str(run_dir),
                run=run,
                attempt=attempt,
                mode=mode,
                num_steps=num_steps or config.train.num_steps or 1,
                model_path=path,
                objective=objective,
                estimator_file=estimator,
            )
            for rank in range(config.fsdp.num_ranks)
        ]
        group = cls(config, Path(run_dir), run)
        try:
            places = seats.ranks if seats is not None else []
            group._actors = [_placed(remote(RankProcess), places, spec.rank).remote(spec, log) for spec in specs]
            if objective == "policy" and needs_frozen(config) and config.reference.placement == "apart":
                places = seats.frozen if seats is not None else []
                group._frozen = [_placed(remote(FrozenProcess), places, spec.rank).remote(spec) for spec in specs]
            group.devices = await group._join(group._actors)
            if group._frozen:
                await group._join(group._frozen)
        except BaseException:
            await group.stop()
            raise
        return group

    def expect(self, plan: StepPlan) -> None:
        """Let the ranks read the rows of a plan while it is being written down."""
        for actor in self._actors:
            actor.expect.remote(plan)

    async def train(self, plan: StepPlan, recorded: RecordedStep | None = None, *, waits_for_log: bool = True) -> StepResult:
        """Train one planned step. A refused step comes back with refused set. Replay raises ReplayMismatchError at a difference.

        waits_for_log: whether scores and gate decisions are in the log on return. Without it they are held back until release(), which
        is for when the plan is in the log; await settle() before the step counts.
        """
        if len(plan.micro_batches) != self.config.fsdp.num_shards:
            fsdp = self.config.fsdp
            raise ReplayMismatchError(
                f"step {plan.step} was planned for {len(plan.micro_batches)} data shards, fsdp.num_ranks={fsdp.num_ranks} over "
                f"fsdp.tp_size x fsdp.cp_size={fsdp.group_size} are {fsdp.num_shards}; start with the planned number"
            )
        import ray

        told = ray.put(plan)  # once, instead of with the call of each rank
        return (await self._ask("train", told, recorded, waits_for_log, own=[a.score.remote(told) for a in self._frozen] or None))[0]

    def release(self) -> None:
        """Let the ranks write down what the newest step computed, behind whatever they are asked next."""
        for actor in self._actors:
            actor.release.remote()

    async def settle(self) -> None:
        """Return once scores and gate decisions of the newest step are in the log, whatever else the ranks do meanwhile."""
        await self._ask("settle", group=LOG_GROUP)

    async def evaluate(self, plan: StepPlan) -> float:
        """Mean negative log-prob over the targets of a plan, for a supervised group."""
        return (await self._ask("evaluate", plan))[0]

    async def publish_weights(self, version: int, *, engines: Sequence[str] = ()) -> WeightSource:
        """Make the weights ready as that version; the version before the previous one is removed, since no engine starts from it.

        engines: names of those that a broadcast reaches (vllm.weight_transfer=nccl).
        """
        folder = weights_folder(self.run) if SHARED_MEMORY.is_dir() else self.run_dir / "weights"
        source: WeightSource = (await self._ask("publish", version, str(folder), list(engines)))[0]
        self._published.append(source)
        while len(self._published) > 2:
            remove_weights(self._published.pop(0))
        return source

    def sender(self, source: WeightSource) -> Callable[[], Awaitable[None]] | None:
        """What the trainer must do while engines receive: a broadcast for transport nccl, nothing for the others."""
        return self._send if source.transport == "nccl" else None

    async def publish_again(self, *, engines: Sequence[str]) -> WeightSource:
        """The version that was published last, for engines that have not got it; a broadcast is prepared anew for exactly these."""
        last = self._published[-1]
        if last.reaches is not None:
            call = self._actors[0].publish_again.remote(list(engines))
            last = (await self._wait("publish_again", [asyncio.ensure_future(_result(call))]))[0]
            self._published[-1] = last
        return last

    @property
    def published_digest(self) -> str:
        """Model digest of the weights that engines were given last; those of the ranks may have moved since."""
        return model_digest(self._published[-1].digests)

    async def _send(self) -> None:
        """RefitError when the broadcast broke off; the ranks stay."""
        broken = (await self._ask("send"))[0]
        if broken is not None:
            raise RefitError(broken)

    async def weights_digest(self) -> str:
        """Model digest over the weights as they are sent to engines."""
        return (await self._ask("weights_digest"))[0]

    async def save(self, *, step: int, policy_version: int, cursor: int, lsn_end: int, root: Path | None = None) -> tuple[Path, str]:
        """Write a checkpoint under root, <run>/checkpoints when absent; returns its folder and the digest of its weights."""
        root = root or self.run_dir / CHECKPOINTS
        folder, digest = (await self._ask("save", str(root), step, policy_version, cursor, lsn_end, self.config.ckpt.keep))[0]
        return Path(folder), digest

    async def newest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint of the run that is whole, and in words those passed over."""
        return (await self._ask("newest", str(self.run_dir / CHECKPOINTS)))[0]

    async def load(self, folder: str | Path) -> Position:
        """Take up a checkpoint on every rank; returns where it stands in run and log."""
        return (await self._ask("load", str(folder)))[0]

    async def export(self, target: str | Path) -> Path:
        """Write the policy as a Hugging Face folder."""
        return Path((await self._ask("export", str(Path(target).absolute())))[0])  # ranks may stand in another folder

    async def stop(self) -> None:
        """End the processes and free the published weights. Harmless when repeated."""
        import ray

        actors = [*self._actors, *self._frozen]
        self._actors, self._frozen = [], []
        refs = [actor.stop.remote() for actor in actors]
        if refs:
            tasks = [asyncio.ensure_future(_result(ref)) for ref in refs]
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
            _drop(tasks)
        for actor in actors:
            ray.kill(actor)
        while self._published:
            remove_weights(self._published.pop())
        shutil.rmtree(weights_folder(self.run), ignore_errors=True)

    async def _join(self, actors: list[Any]) -> list[str]:
        """Let processes meet each other; the device of each."""
        import ray

        is_local = sum(node["Alive"] for node in ray.nodes()) == 1
        place = (await self._wait("listen", [asyncio.ensure_future(_result(actors[0].listen.remote(is_local)))]))[0]
        return await self._wait("join", [asyncio.ensure_future(_result(actor.join.remote(place))) for actor in actors])

    async def _ask(self, method: str, *args: Any, own: list[Any] | None = None, group: str | None = None) -> list[Any]:
        """The answers of all ranks; own: one further argument for each. group: threads that run it beside the rank's other calls.
        The first failure, or the limit, ends the group and is raised."""
        if not self._actors:
            raise self._cause or StalledError(f"trainer group of run {self.run} is stopped; {method} was not asked")
        further = [()] * len(self._actors) if own is None else [(item,) for item in own]
        options = {} if group is None else {"concurrency_group": group}
        calls = [getattr(actor, method).options(**options).remote(*args, *more) for actor, more in zip(self._actors, further, strict=True)]
        return await self._wait(method, [asyncio.ensure_future(_result(call)) for call in calls])

    async def _wait(self, method: str, tasks: list[asyncio.Future[Any]]) -> list[Any]:
        """Wait for all tasks, at most train.step_timeout_s, or until the first fails."""
        limit = self.config.train.step_timeout_s
        try:
            _, pending = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            _drop(tasks)
            raise
        if pending and (known := _errors(tasks)) and _own_error(known) is None:
            # A rank that lost its partner may be heard before the partner's own end.
            await asyncio.wait(pending, timeout=CAUSE_TIMEOUT_S)
        errors = _errors(tasks)
        _drop(pending)
        if errors:
            raise await self._ended_by(_first_cause(errors, method))
        if pending:
            ranks = [rank for rank, task in enumerate(tasks) if task in pending]
            text = f"trainer ranks {ranks} did not answer {method} in train.step_timeout_s={limit:g}; raise it or look at logs/"
            raise await self._ended_by(StalledError(text))
        return [task.result() for task in tasks]

    async def _ended_by(self, error: BaseException) -> BaseException:
        """Stop for an error; returns the one that the group stopped for first, since what others meet afterwards follows from it."""
        self._cause = self._cause or error
        await self.stop()
        return self._cause


def _placed(actor_class: Any, seats: Sequence[Seat], rank: int) -> Any:
    """The actor class of one rank, in its seat where the run has seats."""
    return actor_class.options(**seats[rank].options()) if seats else actor_class


async def _result(ref: Any) -> Any:
    """Wait for a Ray reference as a coroutine."""
    return await ref


def _drop(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait for them no longer; what they still raise is of no interest."""
    for task in tasks:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task.cancel()


def _errors(tasks: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    """What ranks raised so far."""
    ended = {rank: task for rank, task in enumerate(tasks) if task.done() and not task.cancelled()}
    return {rank: error for rank, task in ended.items() if (error := task.exception()) is not None}


def _own_error(errors: dict[int, BaseException]) -> MoltError | None:
    """The first that is one of our own, without Ray's wrapping."""
    causes = (getattr(error, "cause", None) or error for error in errors.values())
    return next((cause for cause in causes if isinstance(cause, MoltError)), None)


def _first_cause(errors: dict[int, BaseException], method: str) -> BaseException:
    """One of our own errors where there is one, since the other ranks then only lost their partner; else what became of the rank."""
    from ray.exceptions import RayError, RayTaskError

    if (own := _own_error(errors)) is not None:
        return own
    dead = [item for item in errors.items() if isinstance(item[1], RayError) and not isinstance(item[1], RayTaskError)]
    rank, error = (dead or list(errors.items()))[0]
    if dead:
        return MoltError(
            f"trainer rank {rank} died in {method} ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "molt train --resume RUN goes on from the newest checkpoint and the log"
        )
    return error
