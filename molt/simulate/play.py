"""The run again as a play of events, under another rule: the product's own admission, with recorded durations for everything else.

    paced     capacity --dispatch--> place --a rollout holds it as long as it did--> inbox --pick--> a step lasts as it did --> version + 1
                  ^------------------------------- a step, a drop or a new version -----------------------------------'
    recorded  groups finish when they did, with the versions that they had; each step is planned when it was, or once enough are there

paced assumes that a rollout holds its place as long however many run beside it; places are as many as in the run, first sent first
served. recorded keeps versions and arrivals, and changes admission only.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from molt.admission.capacity import capacity
from molt.admission.decide import Decision, GroupVerdict
from molt.admission.inbox import Inbox
from molt.simulate.history import History, PastGroup, PastRollout


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the groups, and of the trainer's time."""

    fate: dict[str, Decision] = field(default_factory=dict)
    """Decision of each group that was decided; admitted is trained."""
    lags: list[int] = field(default_factory=list)
    """Lag of each trained group, in versions."""
    num_steps: int = 0
    wait_s: float = 0.0
    """Seconds in which the trainer stood still for want of groups."""
    elapsed_s: float = 0.0
    """From the first dispatch to the end of the last step."""


def play_paced(history: History, *, max_lag: int, queue: int, filter_range: tuple[float, float] | None) -> Outcome:
    """Dispatch as `queue` versions ahead allow, drop what is older than max_lag, until the recorded groups are used up."""
    play = _Paced(history, max_lag, queue, filter_range)
    while play.advance():
        pass
    return play.outcome


class _Paced:
    """The state of a paced play. Time moves to the next end of a rollout or of a step."""

    def __init__(self, history: History, max_lag: int, queue: int, filter_range: tuple[float, float] | None) -> None:
        config = history.config
        self.history = history
        self.queue = queue
        self.groups_per_step = max((step.num_groups for step in history.steps), default=config.groups_per_step)
        self.steps_per_version = max(1, config.rollout.batch_size // max(1, config.groups_per_step))
        self.inbox = Inbox(rule=history.rule(max_lag, filter_range))
        self.outcome = Outcome()
        self.now = 0.0
        self.version = 0
        self.num_sent = 0
        self.waiting: deque[tuple[int, PastRollout]] = deque()
        """Rollouts without a place, first sent first: (place of the group, the rollout)."""
        self.running: list[tuple[float, int, int, int]] = []
        """(end, a number that breaks ties, place of the group, version at its start)"""
        self.num_started = 0
        self.left: dict[int, int] = {}
        """Rollouts of a group that have not ended."""
        self.oldest: dict[int, int] = {}
        self.step_ends: float | None = None
        self.idle_since: float | None = 0.0

    def advance(self) -> bool:
        """One event; False when nothing can happen any more."""
        self._dispatch()
        self._plan()
        self._dispatch()  # a dropped group makes room at once
        ends = [self.running[0][0]] if self.running else []
        ends += [self.step_ends] if self.step_ends is not None else []
        if not ends:
            return False
        self.now = min(ends)
        if self.step_ends is not None and self.step_ends <= self.now:
            self._end_step()
        while self.running and self.running[0][0] <= self.now:
            _, _, place, version = heapq.heappop(self.running)
            self._end_rollout(place, version)
        return True

    def _dispatch(self) -> None:
        room = capacity(
            max_lag=self.queue,
            policy_version=self.version,
            groups_per_version=self.groups_per_step * self.steps_per_version,
            num_consumed=self.inbox.num_consumed,
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
        while self.waiting and len(self.running) < self.history.num_places:
            place, rollout = self.waiting.popleft()
            end = self.now + self.history.start_s + rollout.service_s
            heapq.heappush(self.running, (end, self.num_started, place, self.version))
            self.num_started += 1

    def _end_rollout(self, place: int, version: int) -> None:
        self.oldest[place] = min(self.oldest.get(place, version), version)
        self.left[place] -= 1
        if self.left[place] == 0:
            self._end_group(place)

    def _end_group(self, place: int) -> None:
        """A group is complete: its oldest token has the version in force when its first rollout got a place."""
        group, oldest = self.history.groups[place], self.oldest.get(place)
        self.inbox.take_in(replace(row, version_min=oldest, version_max=self.version) for row in group.segments)
        _close(self.inbox, group)
        self._note(self.inbox.decide(self.version))

    def _plan(self) -> None:
        if self.step_ends is not None:
            return
        segments, verdicts = self.inbox.pick(self.groups_per_step, self.version)
        self._note(verdicts)
        if segments:
            if self.idle_since is not None and self.outcome.num_steps > 0:
                self.outcome.wait_s += self.now - self.idle_since
            self.idle_since = None
            steps = self.history.steps
            self.step_ends = self.now + steps[self.outcome.num_steps % len(steps)].duration_s

    def _end_step(self) -> None:
        self.outcome.num_steps += 1
        self.outcome.elapsed_s = self.now
        self.step_ends, self.idle_since = None, self.now
        self.version += self.outcome.num_steps % self.steps_per_version == 0

    def _note(self, verdicts: list[GroupVerdict]) -> None:
        for verdict in verdicts:
            self.outcome.fate[verdict.group_id] = verdict.decision
            if verdict.decision == Decision.ADMITTED and verdict.lag is not None:
                self.outcome.lags.append(verdict.lag)


def play_recorded(history: History, *, max_lag: int, filter_range: tuple[float, float] | None) -> Outcome:
    """Groups arrive as recorded; each recorded step takes what the rule lets through, waiting where too little is there."""
    outcome, inbox = Outcome(), Inbox(rule=history.rule(max_lag, filter_range))
    arrivals = sorted(history.groups, key=lambda group: group.finished_at)
    for group in arrivals:
        inbox.dispatch(group.group_id)
    planned = [step.planned_at for step in history.steps]
    place, now = 0, planned[0]
    for step in history.steps:
        now = max(now, step.planned_at)
        while True:
            version = history.steps[max(0, bisect_right(planned, now) - 1)].policy_version
            while place < len(arrivals) and arrivals[place].finished_at <= now:
                _arrive(inbox, arrivals[place])
                place += 1
            verdicts = inbox.decide(version)
            segments, picked = inbox.pick(step.num_groups, version)
            for verdict in (*verdicts, *picked):
                outcome.fate[verdict.group_id] = verdict.decision
                if verdict.decision == Decision.ADMITTED and verdict.lag is not None:
                    outcome.lags.append(verdict.lag)
            if segments or place >= len(arrivals):
                break
            outcome.wait_s += arrivals[place].finished_at - now
            now = arrivals[place].finished_at
        if not segments:
            break
        outcome.num_steps += 1
        now += step.duration_s
        outcome.elapsed_s = now - min(group.dispatched_at for group in history.groups)
    return outcome


def _arrive(inbox: Inbox, group: PastGroup) -> None:
    inbox.take_in(group.segments)
    _close(inbox, group)


def _close(inbox: Inbox, group: PastGroup) -> None:
    """Members that are not in the record failed for good, so that the group is complete and is decided by the rule."""
    present = {int(row.rollout_id.split("/")[1]) for row in group.segments}
    for member in range(inbox.rule.group_size):
        if member not in present:
            inbox.fail(group.group_id, member)


def count_fates(history: History, outcome: Outcome) -> tuple[Counter[str], Counter[str]]:
    """Groups and sampled tokens by decision; open for those that were not decided."""
    groups: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for group in history.groups:
        fate = outcome.fate.get(group.group_id)
        name = "open" if fate is None else fate.value
        groups[name] += 1
        tokens[name] += group.n_sampled
    return groups, tokens
