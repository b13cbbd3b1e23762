"""What became of recorded groups under another rule when they arrive as they did: admission alone is played again.

Groups finish when they did, with the versions that they had. Each step is planned when it was, or once enough groups are there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from molt.admission.decide import Decision, GroupVerdict
from molt.admission.inbox import Inbox
from molt.simulate.history import History, PastGroup


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

    def note(self, verdicts: Iterable[GroupVerdict]) -> None:
        """Keep what was decided."""
        for verdict in verdicts:
            self.fate[verdict.group_id] = verdict.decision
            if verdict.decision == Decision.ADMITTED and verdict.lag is not None:
                self.lags.append(verdict.lag)


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
            outcome.note((*verdicts, *picked))
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
    close_group(inbox, group)


def close_group(inbox: Inbox, group: PastGroup) -> None:
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
