"""A step between trainer and engines: sleep, wake, refit, weights for engines that came later; real pool, fleet and log."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molt.admission.decide import AdmissionRule
from molt.admission.inbox import Inbox
from molt.admission.plan import StepPlan, plan_step
from molt.cli.programs import load_program
from molt.config import Config
from molt.driver.leader import Leader
from molt.driver.refit import publish, refit, refit_newcomers
from molt.driver.versions import VersionClock
from molt.errors import RefitError
from molt.learn.result import Refusal, RefusalReason, StepResult
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.writer import LogWriter
from molt.rollout.engine import WeightSource
from molt.rollout.fleet import Fleet
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineSpec
from tests.rollout.test_fleet import Harbour, broadcast, source


class ScriptedRanks:
    """A trainer that publishes as told and notes in the engines' own logs when it trains."""

    def __init__(self, harbour: Harbour, *, is_broadcast: bool = False, is_refusing: bool = False) -> None:
        self.harbour = harbour
        self.is_broadcast = is_broadcast
        self.is_refusing = is_refusing
        self.groups: list[list[str]] = []
        """Engines of each broadcast."""
        self.broken: list[RefitError] = []
        """What the next broadcasts break off with."""
        self.version = 0

    def release(self) -> None:
        """No score is held back."""

    async def settle(self) -> None:
        """No score is on its way."""

    async def train(self, plan: StepPlan, *, waits_for_log: bool) -> StepResult:
        for engine in self.harbour.engines.values():
            engine.log.append("(step)")
        refused = Refusal(reason=RefusalReason.NON_FINITE, error="loss nan") if self.is_refusing else None
        return StepResult(
            step=plan.step, policy_version=0, loss=0.0, grad_norm=0.0, learning_rate=0.0, n_sampled=0, n_kept=0, reward_mean=None,
            kl_mean=None, entropy_mean=None, batch_digest="", loss_digest="", weights_digest=None, refused=refused,
        )  # fmt: skip

    async def publish_weights(self, version: int, *, engines: Sequence[str]) -> WeightSource:
        self.version = version
        return await self.publish_again(engines=engines)

    async def publish_again(self, *, engines: Sequence[str]) -> WeightSource:
        if not self.is_broadcast:
            return source(self.version)
        self.groups.append(list(engines))
        return broadcast(self.version, *engines)

    def sender(self, told: WeightSource) -> Callable[[], Awaitable[None]] | None:
        async def send() -> None:
            if self.broken:
                raise self.broken.pop(0)

        return send if self.is_broadcast else None


class ScriptedLeader(Leader):
    """Tells facts as the real one; steps and plans are not looked at here."""

    def __init__(self, producer: Producer) -> None:
        self.producer, self.log_s, self._told = producer, 0.0, []
        self.inbox = Inbox(rule=AdmissionRule(max_lag=1, group_size=1, drop_incomplete=True, filter_range=None))

    def announce(self, step: int, policy_version: int, *, num_ranks: int) -> None:
        """Nothing is ready."""

    def record(self, plan: StepPlan, result: StepResult, *, wait_s: float) -> None:
        """Not looked at."""

    def serve(self, policy_version: int) -> None:
        """Not looked at."""

    def figures(self, plan: StepPlan, result: StepResult, *, wait_s: float) -> dict[str, Any]:
        return {}


class Rig:
    """One engine or more in a real fleet and pool, over a real log."""

    def __init__(self, folder: Path, writer: LogWriter, *, num_engines: int = 1, vllm: dict[str, Any] | None = None, **told: bool) -> None:
        self.folder = folder
        self.harbour = Harbour()
        self.ranks = ScriptedRanks(self.harbour, **told)
        rooms = {"vllm": vllm or {}, "train": {"batch_size": 2}, "rollout": {"batch_size": 2}}
        config = Config.model_validate(rooms)
        specs = [EngineSpec(name=f"e{index}", kind="vllm", model_path="m", dtype="float32", max_len=9) for index in range(num_engines)]
        self.fleet = Fleet(specs, launch=self.harbour.launch)  # type: ignore[arg-type]
        pool = RolloutPool(config, sink=writer, fleet=self.fleet, crew=SimpleNamespace())  # type: ignore[arg-type]
        self.house: Any = SimpleNamespace(config=config, ranks=self.ranks, pool=pool, producer=Producer(writer, "driver"))
        self.leader = ScriptedLeader(self.house.producer)
        self.clock = VersionClock.of(config)

    async def step(self, number: int) -> None:
        """One step of the loop."""
        plan = plan_step([], step=number, policy_version=0, seed=0, num_ranks=1, micro_batch_tokens=64, cursor=0)
        progress: Any = SimpleNamespace(waiting=lambda text: None, step=lambda figures: None)
        await load_program("rl").train_step(self.house, self.leader, progress, plan, self.clock, wait_s=0.0)

    def log(self, name: str = "e0") -> list[str]:
        """What the engine was asked since its start."""
        return self.harbour.engines[name].log[1:]

    async def refits(self) -> list[tuple[int, list[str]]]:
        """Version and engines of each refit in the log."""
        await self.leader.settled()
        bodies = LogReader.open(self.folder).cut().table("events", ["lsn", "body"], where="kind = 'weights_refit'").sort_by("lsn")
        told = [json.loads(body) for body in bodies.column("body").to_pylist()]
        return [(body["policy_version"], sorted(json.loads(body["engines"]))) for body in told]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    with LogWriter.open(tmp_path / "run", run="run", attempt=1, store="process") as writer:
        yield writer


async def test_engines_are_awake_throughout_when_they_do_not_sleep(tmp_path: Path, writer: LogWriter) -> None:
    rig = Rig(tmp_path / "run", writer)
    await rig.fleet.start()
    await rig.step(0)
    assert rig.log() == ["(step)", "pause wait", "refit", "resume"]


@pytest.mark.parametrize("level", [1, 2])
async def test_engines_sleep_while_the_trainer_steps_and_wake_for_the_refit(tmp_path: Path, writer: LogWriter, level: int) -> None:
    rig = Rig(tmp_path / "run", writer, vllm={"sleep_level": level})
    await rig.fleet.start()
    await rig.step(0)
    assert rig.log() == [f"sleep {level}", "(step)", "wake", "pause wait", "refit", "resume"]
    assert await rig.refits() == [(1, ["e0"])]


async def test_after_a_step_without_a_new_version_sleepers_of_level_1_go_on_with_what_they_kept(tmp_path: Path, writer: LogWriter) -> None:
    rig = Rig(tmp_path / "run", writer, vllm={"sleep_level": 1}, is_refusing=True)
    await rig.fleet.start()
    await rig.step(0)
    assert rig.log() == ["sleep 1", "(step)", "wake", "resume"] and await rig.refits() == []


async def test_after_a_step_without_a_new_version_sleepers_of_level_2_get_the_old_one_again(tmp_path: Path, writer: LogWriter) -> None:
    rig = Rig(tmp_path / "run", writer, vllm={"sleep_level": 2}, is_refusing=True)
    await rig.fleet.start()
    await refit(rig.house, rig.leader, await publish(rig.house, 0), step=-1)
    await rig.step(0)
    assert rig.log()[3:] == ["sleep 2", "(step)", "wake", "pause wait", "refit", "resume"]
    assert await rig.refits() == [(0, ["e0"]), (0, ["e0"])]


async def test_a_broadcast_that_loses_its_engine_is_planned_again_for_the_one_in_its_place(tmp_path: Path, writer: LogWriter) -> None:
    rig = Rig(tmp_path / "run", writer, is_broadcast=True)
    await rig.fleet.start()
    await refit(rig.house, rig.leader, await publish(rig.house, 0), step=-1)
    rig.harbour.engines["e0"].is_dead = True  # nobody knows yet
    await refit(rig.house, rig.leader, await publish(rig.house, 1), step=0)
    assert rig.ranks.groups == [["e0"], ["e0"], ["e0+1"]]
    assert await rig.refits() == [(0, ["e0"]), (1, ["e0+1"])] and [berth.spec.name for berth in rig.fleet.serving] == ["e0+1"]


async def test_a_broadcast_that_breaks_off_is_made_again(tmp_path: Path, writer: LogWriter) -> None:
    rig = Rig(tmp_path / "run", writer, is_broadcast=True, num_engines=2)
    await rig.fleet.start()
    rig.ranks.broken = [RefitError("it did not end")]
    for engine in rig.harbour.engines.values():
        engine.refits = [RefitError("nothing came")]
    await refit(rig.house, rig.leader, await publish(rig.house, 1), step=0)
    assert rig.ranks.groups == [["e0", "e1"]] * 2 and await rig.refits() == [(1, ["e0", "e1"])]


async def test_a_newcomer_gets_a_broadcast_of_the_version_that_the_others_serve(tmp_path: Path, writer: LogWriter) -> None:
    rig = Rig(tmp_path / "run", writer, is_broadcast=True, num_engines=2)
    await rig.fleet.start()
    await refit(rig.house, rig.leader, await publish(rig.house, 3), step=2)
    await refit_newcomers(rig.house, rig.leader, step=2)  # there is none: nothing happens
    rig.fleet.retire("e1", "it was killed")
    await rig.fleet.sleep(1)  # waits for it
    assert rig.house.pool.newcomers == ["e1+1"]
    before = len(rig.log("e0"))
    await refit_newcomers(rig.house, rig.leader, step=2)
    assert rig.ranks.groups == [["e0", "e1"], ["e1+1"]] and await rig.refits() == [(3, ["e0", "e1"]), (3, ["e1+1"])]
    assert len(rig.log("e0")) == before  # the others sample on meanwhile
    assert len(rig.fleet.serving) == 2
