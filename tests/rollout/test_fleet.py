"""The fleet on scripted engines: who serves after refits that fail, hang or lie, and after deaths."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace

import pytest

from molt.errors import EngineError, LogError, RefitError
from molt.rollout.engine import EngineInfo, RefitReport, WeightSource
from molt.rollout.engine_actor import EngineHealth
from molt.rollout.fleet import MAX_REPLACEMENTS, Fleet
from molt.rollout.spec import EngineSpec


@dataclass
class Scripted:
    """An engine handle that does what the test says."""

    spec: EngineSpec
    refits: list[object] = field(default_factory=list)
    """Outcome of each refit in turn: an error to raise, a version to report, or nothing for a good one."""
    log: list[str] = field(default_factory=list)
    version: int = 0
    is_dead: bool = False
    is_silent: bool = False
    start_error: Exception | None = None
    resume_error: Exception | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def _note(self, what: str) -> None:
        self.log.append(what)
        if self.is_dead:
            raise EngineError(f"engine {self.name} is gone")

    async def start(self) -> EngineInfo:
        self._note("start")
        if self.start_error is not None:
            raise self.start_error
        return EngineInfo(name=self.name, kind="scripted", policy_version=0, max_len=9, vocab_size=9, weights_digest="same")

    async def pause(self, mode: str) -> int:
        self._note(f"pause {mode}")
        return 2

    async def refit(self, source: WeightSource) -> RefitReport:
        self._note("refit")
        outcome = self.refits.pop(0) if self.refits else source.policy_version
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, int)
        self.version = outcome
        return RefitReport(engine=self.name, policy_version=outcome, weights_digest="d", load_s=0.1, verify_s=0.1, num_in_flight=2)

    async def resume(self) -> None:
        self._note("resume")
        if self.resume_error is not None:
            raise self.resume_error

    async def refuse(self, why: str) -> None:
        self._note("refuse")

    async def health(self, limit_s: float) -> EngineHealth:
        self._note("health")
        return EngineHealth(num_in_flight=0, num_sampled=0, is_paused=False, pid=1)

    async def probe(self, limit_s: float) -> None:
        self._note("probe")
        if self.is_silent:
            raise EngineError(f"engine {self.name}: probe was not answered")

    async def sleep(self, level: int) -> None:
        self._note(f"sleep {level}")

    async def wake(self) -> None:
        self._note("wake")

    async def stop(self) -> None:
        self._note("stop")

    def kill(self) -> None:
        self.log.append("kill")


class Harbour:
    """Launches scripted engines and remembers them by name."""

    def __init__(self, **start_errors: Exception) -> None:
        self.engines: dict[str, Scripted] = {}
        self.start_errors = start_errors

    def launch(self, spec: EngineSpec) -> Scripted:
        self.engines[spec.name] = Scripted(spec=spec, start_error=self.start_errors.get(spec.name.replace("+", "_")))
        return self.engines[spec.name]


async def started(num: int, harbour: Harbour) -> Fleet:
    specs = [EngineSpec(name=f"e{index}", kind="embedded", model_path="m", dtype="float32", max_len=9) for index in range(num)]
    fleet = Fleet(specs, launch=harbour.launch)  # type: ignore[arg-type]
    await fleet.start()
    return fleet


def source(version: int) -> WeightSource:
    return WeightSource(policy_version=version, transport="file", path="p", digests={"a": "b"}, options={"size_bytes": "10"})


def broadcast(version: int, *engines: str) -> WeightSource:
    """Weights that reach exactly these engines, all at once."""
    init = json.dumps({name: {} for name in engines})
    return WeightSource(policy_version=version, transport="nccl", digests={"a": "b"}, options={"init": init})


async def sent() -> None:
    """A trainer's broadcast that goes well."""


async def test_a_good_refit_pauses_loads_and_resumes_every_engine() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    times = await fleet.refit(source(1), pause_mode="wait")
    assert [engine.log for engine in harbour.engines.values()] == [["start", "pause wait", "refit", "resume"]] * 2
    assert fleet.policy_version == 1 and times.num_in_flight == 4 and times.size_bytes == 10 and not times.failed


async def test_new_weights_are_sampled_with_only_once_that_is_allowed() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    seen: list[list[str]] = []

    async def allowed() -> None:
        seen.extend(list(engine.log) for engine in harbour.engines.values())

    await fleet.refit(source(1), pause_mode="wait", allowed=allowed)
    assert seen == [["start", "pause wait", "refit"]] * 2
    assert [engine.log[-1] for engine in harbour.engines.values()] == ["resume", "resume"]


async def test_weights_that_are_never_allowed_leave_engines_paused_and_the_old_version_in_force() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)

    async def allowed() -> None:
        raise LogError("the log takes nothing")

    with pytest.raises(LogError, match="the log takes nothing"):
        await fleet.refit(source(1), pause_mode="keep", allowed=allowed)
    assert harbour.engines["e0"].log == ["start", "pause keep", "refit"] and fleet.policy_version == 0


async def test_when_all_refuse_the_old_version_serves_on() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    for engine in harbour.engines.values():
        engine.refits = [RefitError("bad digest")]
    with pytest.raises(RefitError, match="e0: bad digest; e1: bad digest"):
        await fleet.refit(source(1), pause_mode="keep")
    assert fleet.policy_version == 0 and len(fleet.serving) == 2
    assert all(engine.log[-1] == "resume" for engine in harbour.engines.values())


async def test_one_that_refuses_is_out_of_service_until_a_later_refit() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    harbour.engines["e1"].refits = [RefitError("bad digest")]
    times = await fleet.refit(source(1), pause_mode="keep")
    assert times.failed == {"e1": "bad digest"} and set(times.engines) == {"e0"}
    assert harbour.engines["e1"].log[-1] == "refuse"
    assert [(await fleet.take_berth()).spec.name for _ in range(3)] == ["e0"] * 3
    await fleet.refit(source(2), pause_mode="keep")
    assert len(fleet.serving) == 2 and harbour.engines["e1"].log[-1] == "resume"


async def test_one_that_cannot_go_on_with_new_weights_is_replaced_and_holds_no_rollouts() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    harbour.engines["e0"].resume_error = EngineError("engine e0: no memory for its cache")
    assert (await fleet.refit(source(1), pause_mode="keep")).failed == {"e0": "engine e0: no memory for its cache"}
    assert (await fleet.take_berth()).spec.name == "e0+1" and harbour.engines["e0+1"].version == 1


async def test_one_that_reports_another_version_does_not_serve() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    harbour.engines["e1"].refits = [0]
    times = await fleet.refit(source(1), pause_mode="keep")
    assert times.failed == {"e1": "reports version 0"}
    assert [berth.spec.name for berth in fleet.serving] == ["e0"]


async def test_one_that_does_not_answer_a_refit_is_replaced_by_one_with_the_new_weights() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    harbour.engines["e1"].refits = [EngineError("engine e1: refit was not answered within 300 s")]
    await fleet.refit(source(1), pause_mode="keep")
    await asyncio.sleep(0.01)
    assert "kill" in harbour.engines["e1"].log
    assert harbour.engines["e1+1"].log == ["start", "pause keep", "refit", "resume"]
    assert [berth.spec.name for berth in fleet.serving] == ["e0", "e1+1"]


async def test_rollouts_wait_for_the_replacement_of_the_only_engine() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    harbour.engines["e0"].is_dead = True
    assert not await fleet.examine("e0")
    assert (await fleet.take_berth()).spec.name == "e0+1"
    assert harbour.engines["e0+1"].log == ["start"]  # no refit was made yet: it starts with the weights of the others


async def test_a_refit_waits_for_the_replacement_of_the_only_engine() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    fleet.retire("e0", "it hangs")
    times = await fleet.refit(source(1), pause_mode="keep")
    assert set(times.engines) == {"e0+1"}


async def test_an_engine_that_answers_and_does_not_sample_is_replaced() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    harbour.engines["e0"].is_silent = True
    assert not await fleet.examine("e0") and await fleet.examine("e1")
    assert fleet.berths["e0"].death == "engine e0: probe was not answered"


async def test_replacements_end_and_the_cause_is_told() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    name = "e0"
    for number in range(1, MAX_REPLACEMENTS + 1):
        fleet.retire(name, f"death {number}")
        await asyncio.sleep(0.01)
        name = f"e0+{number}"
    fleet.retire(name, "the last death")
    with pytest.raises(EngineError, match="the last death"):
        await fleet.take_berth()


async def test_replacements_of_an_engine_that_took_a_refit_are_counted_anew() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    name = "e0"
    for number in range(1, 3 * MAX_REPLACEMENTS):
        fleet.retire(name, f"death {number}")
        await asyncio.sleep(0.01)
        name = f"e0+{number}"
        if number % MAX_REPLACEMENTS == 0:
            await fleet.refit(source(number), pause_mode="keep")
    assert (await fleet.take_berth()).spec.name == name


async def test_a_replacement_that_does_not_start_is_tried_again() -> None:
    harbour = Harbour(e0_1=EngineError("no memory"))
    fleet = await started(1, harbour)
    fleet.retire("e0", "it hangs")
    assert (await fleet.take_berth()).spec.name == "e0+2"


async def test_replacements_that_never_start_are_told() -> None:
    harbour = Harbour(**{f"e0_{number}": EngineError(f"no memory {number}") for number in range(1, MAX_REPLACEMENTS + 1)})
    fleet = await started(1, harbour)
    fleet.retire("e0", "it hangs")
    with pytest.raises(EngineError, match=f"no memory {MAX_REPLACEMENTS}"):
        await fleet.take_berth()


async def test_one_that_does_not_start_with_the_others_is_replaced_while_they_serve() -> None:
    harbour = Harbour(e1=EngineError("its process was killed"))
    fleet = await started(2, harbour)
    assert [berth.spec.name for berth in fleet.serving] == ["e0"] and harbour.engines["e1"].log[-1] == "kill"
    assert fleet.berths["e1"].death == "it did not start: its process was killed"
    await asyncio.sleep(0.01)
    assert sorted(berth.spec.name for berth in fleet.serving) == ["e0", "e1+1"]


async def test_engines_of_which_none_starts_end_the_run_with_each_cause() -> None:
    with pytest.raises(EngineError, match="no engine started: no memory 0; no memory 1; "):
        await started(2, Harbour(e0=EngineError("no memory 0"), e1=EngineError("no memory 1")))


async def test_a_replacement_with_another_model_does_not_serve() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    fleet._first = replace(fleet._first, weights_digest="another")  # type: ignore[type-var]
    fleet.retire("e0", "it hangs")
    with pytest.raises(EngineError, match="it loaded other weights"):
        await fleet.take_berth()


async def test_engines_with_different_weights_are_refused_at_start() -> None:
    harbour = Harbour()

    def launch(spec: EngineSpec) -> Scripted:
        engine = harbour.launch(spec)
        info = EngineInfo(name=spec.name, kind="scripted", policy_version=0, max_len=9, vocab_size=9, weights_digest=spec.name)

        async def start() -> EngineInfo:
            return info

        engine.start = start  # type: ignore[method-assign]
        return engine

    specs = [EngineSpec(name=f"e{index}", kind="embedded", model_path="m", dtype="float32", max_len=9) for index in range(2)]
    with pytest.raises(EngineError, match="different weights"):
        await Fleet(specs, launch=launch).start()  # type: ignore[arg-type]


async def test_a_broadcast_runs_while_engines_receive_and_its_failure_is_a_refit_error() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    sent: list[str] = []

    async def send() -> None:
        sent.append(harbour.engines["e0"].log[-1])

    await fleet.refit(source(1), pause_mode="keep", send=send)
    assert sent in (["refit"], ["pause keep"]) and fleet.policy_version == 1

    async def fail() -> None:
        raise ValueError("no such port")

    harbour.engines["e0"].refits = [RefitError("nothing came")]
    with pytest.raises(RefitError, match="nothing came; the trainer's broadcast failed: no such port"):
        await fleet.refit(source(2), pause_mode="keep", send=fail)
    assert harbour.engines["e0"].log[-1] == "resume"


async def test_a_broadcast_waits_for_no_engine_that_is_gone() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    fleet.retire("e1", "it hangs")
    with pytest.raises(RefitError, match="e1 died after the trainer's process group was planned"):
        await fleet.refit(broadcast(1, "e0", "e1"), pause_mode="keep", send=sent)
    assert harbour.engines["e0"].log == ["start"]  # it was not even paused


async def test_a_broadcast_does_not_begin_when_one_of_its_engines_cannot_be_paused() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    harbour.engines["e1"].is_dead = True
    was_sent: list[int] = []

    async def send() -> None:
        was_sent.append(1)

    with pytest.raises(RefitError, match="a broadcast needs every engine of its group"):
        await fleet.refit(broadcast(1, "e0", "e1"), pause_mode="keep", send=send)
    assert not was_sent and harbour.engines["e0"].log == ["start", "pause keep", "resume"]
    assert fleet.berths["e1"].death is not None and fleet.policy_version == 0


async def test_a_newcomer_gets_its_weights_by_a_broadcast_of_its_own() -> None:
    harbour = Harbour()
    fleet = await started(1, harbour)
    await fleet.refit(broadcast(1, "e0"), pause_mode="keep", send=sent)
    fleet.retire("e0", "it hangs")
    rollout = asyncio.create_task(fleet.take_berth())
    await asyncio.sleep(0.1)
    assert fleet.newcomers == ["e0+1"] == await fleet.alive()
    assert not rollout.done() and harbour.engines["e0+1"].log == ["start"]  # the old broadcast is over: it waits, and so do rollouts
    times = await fleet.refit(broadcast(1, "e0+1"), pause_mode="keep", send=sent, only=["e0+1"])
    assert set(times.engines) == {"e0+1"} and fleet.newcomers == []
    assert (await rollout).spec.name == "e0+1"


async def test_a_refit_for_some_leaves_the_others_alone() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    await fleet.refit(source(1), pause_mode="wait", only=["e1"])
    assert harbour.engines["e0"].log == ["start"] and harbour.engines["e1"].log == ["start", "pause wait", "refit", "resume"]


async def test_sleep_waits_for_engines_on_their_way_and_a_refit_may_follow_the_wake() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    fleet.retire("e1", "it hangs")
    await fleet.sleep(2)
    await fleet.wake(is_refit_next=True)
    await fleet.refit(source(1), pause_mode="wait")
    for name in ("e0", "e1+1"):
        assert harbour.engines[name].log == ["start", "sleep 2", "wake", "pause wait", "refit", "resume"]
    await fleet.sleep(1)
    await fleet.wake(is_refit_next=False)
    assert harbour.engines["e0"].log[-3:] == ["sleep 1", "wake", "resume"]


async def test_an_engine_that_dies_while_all_sleep_is_replaced_after_the_wake() -> None:
    harbour = Harbour()
    fleet = await started(2, harbour)
    await fleet.sleep(1)
    fleet.retire("e0", "it died")
    fleet.retire("e1", "it died")
    await asyncio.sleep(0.01)
    assert not harbour.engines.keys() & {"e0+1", "e1+1"}  # their memory is where the trainer steps now
    async with asyncio.timeout(1.0):
        assert await fleet.alive() == []  # weights are published before the wake
    await fleet.wake(is_refit_next=True)
    await fleet.refit(source(1), pause_mode="keep")
    assert {harbour.engines[name].version for name in ("e0+1", "e1+1")} == {1}
    assert [berth.spec.name for berth in fleet.serving] == ["e0+1", "e1+1"]
