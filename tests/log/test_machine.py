"""A state machine over append, resend, crash, compact, clean up, pin, seal and tail, against a plain list in memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from molt.errors import ConflictingAppendError
from molt.log.message import Message
from molt.log.pin import Pin, create_pin, delete_pin, verify_pin
from molt.log.reader import LogReader, Tail
from molt.log.seal import read_seal, seal_log
from molt.log.upkeep import Upkeep
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tests.log.build import make_message
from tests.log.conftest import quick

PRODUCERS = ("a", "b")


class LogMachine(RuleBasedStateMachine):
    """The model: for each producer the indices of its messages, and all committed indices in order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run_dir = self.folder / "run"
        self.committed: list[int] = []
        self.sent: dict[str, list[Message]] = {name: [] for name in PRODUCERS}
        self.counter = 0
        self.tailed: list[int] = []
        self.pins: dict[str, tuple[Pin, list[int]]] = {}
        self.writer: LogWriter | None = None
        self.tail: Tail | None = None

    @initialize()
    def open(self) -> None:
        self.writer = self._opened()
        self.tail = LogReader.open(self.run_dir).tail("segments", ["prompt_index"])

    def _opened(self, *, steal: bool = False) -> LogWriter:
        store = quick("process", window_ms=0.5)
        upkeep = store.upkeep.model_copy(update={"max_fragments": 3, "keep_versions": 2, "grace_s": 0.0})
        return LogWriter.open(self.run_dir, run="run", store=store.model_copy(update={"upkeep": upkeep}), steal=steal)

    def _live(self) -> LogWriter:
        assert self.writer is not None
        return self.writer

    @rule(name=st.sampled_from(PRODUCERS), rows=st.integers(1, 3), copies=st.integers(1, 3))
    def append(self, name: str, rows: int, copies: int) -> None:
        indices = list(range(self.counter, self.counter + rows))
        self.counter += rows
        message = make_message(name, len(self.sent[name]), indices, facts=indices)
        self.sent[name].append(message)
        acks = [future.result(20) for future in [self._live().submit(message) for _ in range(copies)]]
        assert {ack.seq for ack in acks} == {message.seq}
        self.committed += indices

    @rule(data=st.data(), name=st.sampled_from(PRODUCERS))
    def resend(self, data: st.DataObject, name: str) -> None:
        if self.sent[name]:
            message = data.draw(st.sampled_from(self.sent[name]))
            assert self._live().submit(message).result(20).is_repetition

    @rule(data=st.data(), name=st.sampled_from(PRODUCERS))
    def conflict(self, data: st.DataObject, name: str) -> None:
        if self.sent[name]:
            seq = data.draw(st.sampled_from(self.sent[name])).seq
            try:
                self._live().submit(make_message(name, seq, [999_999])).result(20)
            except ConflictingAppendError:
                return
            raise AssertionError("another payload was taken under a known place")

    @rule()
    def restart(self) -> None:
        self._live().close()
        self.writer = self._opened()

    @rule()
    def replace(self) -> None:
        """The writer is left as it stands, as after a crash, and another takes its place."""
        old, self.writer = self._live(), self._opened(steal=True)
        old.close()

    @rule()
    def compact(self) -> None:
        self._live().between_commits(lambda core: [Upkeep(core).compact(table, is_full=True) for table in core.tables.values()]).result(20)

    @rule()
    def clean_up(self) -> None:
        self._live().between_commits(lambda core: [Upkeep(core).clean_up(table, keep=1) for table in core.tables.values()]).result(20)

    @rule()
    def seal(self) -> None:
        made = self._live().between_commits(seal_log).result(20)
        assert made.num_rows["segments"] == len(self.committed)
        assert read_seal(LogReader.open(self.run_dir).home) == made

    @precondition(lambda self: len(self.pins) < 3)
    @rule()
    def pin(self) -> None:
        name = f"pin{self.counter}-{len(self.pins)}"
        if name not in self.pins:
            self.pins[name] = (create_pin(self.run_dir, name), list(self.committed))

    @precondition(lambda self: bool(self.pins))
    @rule(data=st.data())
    def check_pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        pin, known = self.pins[name]
        assert verify_pin(self.run_dir, name) == []
        cut = LogReader.open(self.run_dir).cut_of(pin.versions, pin.lsn)
        assert cut.table("segments", ["prompt_index"])["prompt_index"].to_pylist() == known

    @precondition(lambda self: bool(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        delete_pin(self.run_dir, name)
        del self.pins[name]

    @rule()
    def poll(self) -> None:
        assert self.tail is not None
        self.tailed += self.tail.poll()["prompt_index"].to_pylist()
        assert self.tailed == self.committed

    @rule()
    def verify(self) -> None:
        assert verify_log(self.run_dir).findings == []

    @invariant()
    def the_log_is_the_model(self) -> None:
        if self.writer is not None:
            cut = LogReader.open(self.run_dir).cut()
            assert cut.table("segments", ["prompt_index"])["prompt_index"].to_pylist() == self.committed
            assert cut.table("events", ["step"])["step"].to_pylist() == self.committed

    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()
        shutil.rmtree(self.folder)


LogMachine.TestCase.settings = settings(
    max_examples=6, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TestLogMachine = LogMachine.TestCase


@pytest.mark.slow
def test_long_walks_of_the_state_machine() -> None:
    run_state_machine_as_test(
        LogMachine,
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None),
    )
