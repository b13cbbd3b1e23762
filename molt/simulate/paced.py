"""The run again as a play of events under another bound: the product's own admission, with recorded times for everything else.

    capacity --dispatch--> place --start--> model call, tool, model call, ... --end--> inbox --pick--> train --> refit --> version + 1
        ^                                     | held while a refit waits or runs |                              |
        '------------------ a step, a drop, a new version makes room -----------------------------------------'

A refit waits for the model calls that run, unless partial rollouts are on; then they go on after it. Calls that would begin
meanwhile are held. A rollout spends on model and tools what it spent in the record, whoever runs beside it: that is the
assumption of the play. Places are as many as in the run, first sent first served.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from molt.admission.capacity import capacity
from molt.admission.inbox import Inbox
from molt.simulate.history import History, PastRollout, PastStep
from molt.simulate.play import Outcome, close_group


def play_paced(history: History, *, max_lag: int, queue: int, filter_range: tuple[float, float] | None) -> Outcome:
    """Dispatch as `queue` versions ahead allow, drop what is older than max_lag, until the recorded groups are used up."""
    play = _Play(history=history, queue=queue, inbox=Inbox(rule=history.rule(max_lag, filter_range)))
    while play.advance():
        pass
    return play.outcome


@dataclass(slots=True, eq=False)
class _Rollout:
    """A rollout that holds a place."""

    place: int
    """Of its group in the history."""
    phases: Iterator[tuple[bool, float]]
    """(whether the model is called, seconds), in order."""
    version: int | None = None
    """In force when its first model call began."""
    is_calling: bool = False
    call_s: float = 0.0


@dataclass(slots=True)
class _Play:
    """The state of a play. Time moves from event to event: the end of a phase of a rollout, of training, of a refit."""

    history: History
    queue: int
    inbox: Inbox
    outcome: Outcome = field(default_factory=Outcome)
    now: float = 0.0
    version: int = 0
    num_sent: int = 0
    waiting: deque[tuple[int, PastRollout]] = field(default_factory=deque)
    """Rollouts without a place, first sent first."""
    events: list[tuple[float, int, object]] = field(default_factory=list)
    """(time, a number that breaks ties, a rollout or what the trainer does)"""
    num_events: int = 0
    num_placed: int = 0
    num_calling: int = 0
    held: list[_Rollout] = field(default_factory=list)
    """Rollouts whose next model call waits for the refit."""
    left: dict[int, int] = field(default_factory=dict)
    """Rollouts of a group that have not ended."""
    oldest: dict[int, int] = field(default_factory=dict)
    is_refitting: bool = False
    is_training: bool = False
    idle_since: float = 0.0

    def advance(self) -> bool:
        """One event; False when nothing can happen any more."""
        self._dispatch()
        self._plan()
        self._dispatch()  # a dropped group makes room at once
        if not self.events:
            return False
        self.now, _, what = heapq.heappop(self.events)
        if isinstance(what, _Rollout):
            self._next_phase(what)
        elif what == "trained":
            self._end_training()
        else:
            self._end_refit()
        return True

    def _at(self, time: float, what: object) -> None:
        heapq.heappush(self.events, (time, self.num_events, what))
        self.num_events += 1

    # Rollouts

    def _dispatch(self) -> None:
        room = capacity(
            max_lag=self.queue,
            groups_per_version=self.history.groups_per_step * self.history.steps_per_version,
            num_consumed=self.inbox.num_consumed - self.inbox.num_before,
            num_running=self.inbox.num_running,
        )
        for _ in range(min(room, len(self.history.groups) - self.num_sent)):
            group = self.history.groups[self.num_sent]
            self.inbox.dispatch(group.group_id)
            self.left[self.num_sent] = len(group.rollouts)
            self.waiting.extend((self.num_sent, rollout) for rollout in group.rollouts)
            if not group.rollouts:
                self._end_group(self.num_sent)
            self.num_sent += 1
        while self.waiting and self.num_placed < self.history.num_places:
            place, rollout = self.waiting.popleft()
            self.num_placed += 1
            self._at(self.now + self.history.start_s, _Rollout(place=place, phases=self.history.phases(rollout)))

    def _next_phase(self, rollout: _Rollout) -> None:
        self._end_call(rollout)
        phase = next(rollout.phases, None)
        if phase is None:
            self._end_rollout(rollout)
        elif not phase[0]:
            self._at(self.now + phase[1], rollout)
        else:
            rollout.call_s = phase[1]
            if self.is_refitting:
                self.held.append(rollout)
            else:
                self._begin_call(rollout)

    def _begin_call(self, rollout: _Rollout) -> None:
        rollout.version = self.version if rollout.version is None else rollout.version
        rollout.is_calling = True
        self.num_calling += 1
        self._at(self.now + rollout.call_s, rollout)

    def _end_call(self, rollout: _Rollout) -> None:
        if rollout.is_calling:
            rollout.is_calling = False
            self.num_calling -= 1
            if self.is_refitting and self.num_calling == 0 and not self.history.is_partial:
                self._transfer()

    def _end_rollout(self, rollout: _Rollout) -> None:
        place = rollout.place
        version = self.version if rollout.version is None else rollout.version
        self.num_placed -= 1
        self.oldest[place] = min(self.oldest.get(place, version), version)
        self.left[place] -= 1
        if self.left[place] == 0:
            self._end_group(place)

    def _end_group(self, place: int) -> None:
        """A group is complete: its oldest token has the version in force at its first model call."""
        group, oldest = self.history.groups[place], self.oldest.get(place)
        self.inbox.take_in(replace(row, version_min=oldest, version_max=self.version) for row in group.segments)
        close_group(self.inbox, group)
        self.outcome.note(self.inbox.decide(self.version))

    # The trainer

    def _plan(self) -> None:
        if self.is_training:
            return
        segments, verdicts = self.inbox.pick(self.history.groups_per_step, self.version)
        self.outcome.note(verdicts)
        if segments:
            if self.outcome.num_steps > 0:
                self.outcome.wait_s += self.now - self.idle_since
            self.is_training = True
            self._at(self.now + self._step().train_s, "trained")

    def _step(self) -> PastStep:
        return self.history.steps[self.outcome.num_steps % len(self.history.steps)]

    def _end_training(self) -> None:
        if (self.outcome.num_steps + 1) % self.history.steps_per_version:
            self._end_step()
            return
        self.is_refitting = True
        if self.num_calling == 0 or self.history.is_partial:
            self._transfer()

    def _transfer(self) -> None:
        """The weights go over; calls that go on through it end that much later."""
        refit_s = self._step().refit_s
        if self.num_calling:
            self.events = [
                (time + refit_s if isinstance(what, _Rollout) and what.is_calling else time, number, what)
                for time, number, what in self.events
            ]
            heapq.heapify(self.events)
        self._at(self.now + refit_s, "refitted")

    def _end_refit(self) -> None:
        self.version += 1
        self.inbox.begin_version()
        self.is_refitting = False
        self._end_step()
        held, self.held = self.held, []
        for rollout in held:
            self._begin_call(rollout)

    def _end_step(self) -> None:
        self.outcome.num_steps += 1
        self.outcome.elapsed_s = self.now
        self.is_training, self.idle_since = False, self.now
