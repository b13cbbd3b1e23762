"""Groups between dispatch and training, as the log tells it: rows in, complete groups out, every one decided once.

dispatched --(rows of all members, or their final failures)--> complete --decide--> ready --pick--> consumed
                                                                  |                  |
                                                                  `-- dropped        `-- stale
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from molt.admission.decide import AdmissionRule, Decision, GroupVerdict, decide_group
from molt.admission.plan import SegmentRow


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A dispatched group that has not trained yet."""

    group_id: str
    group_size: int
    """Members that it was dispatched with: a resumed run may send others with more or fewer."""
    members: dict[int, list[SegmentRow]] = field(default_factory=dict)
    """Finished members with the segments of their rollout."""
    failed: set[int] = field(default_factory=set)
    """Members that failed for good."""

    @property
    def segments(self) -> list[SegmentRow]:
        """Every segment of every finished member."""
        return [row for member in sorted(self.members) for row in self.members[member]]

    @property
    def missing(self) -> list[int]:
        """Members that neither finished nor failed for good."""
        return [member for member in range(self.group_size) if member not in self.members and member not in self.failed]


@dataclass(slots=True, kw_only=True)
class Inbox:
    """The trainer's view of groups. Rows and failures may come twice or in any order; a group is decided once."""

    rule: AdmissionRule
    open: dict[str, OpenGroup] = field(default_factory=dict)
    ready: dict[str, OpenGroup] = field(default_factory=dict)
    heard_of: set[str] = field(default_factory=set)
    """Open groups with news since the last decision."""
    num_consumed: int = 0
    """Groups trained, and those of refused steps."""
    num_before: int = 0
    """Those of them before the version in force."""
    cursor: int = -1
    """Largest lsn of segments taken in."""

    @property
    def num_running(self) -> int:
        """Groups dispatched and neither trained nor dropped."""
        return len(self.open) + len(self.ready)

    def begin_version(self, *, num_since: int = 0) -> None:
        """Note that the version in force began before the newest num_since groups."""
        self.num_before = self.num_consumed - num_since

    def size_of(self, group_id: str) -> int:
        """Members of a group that is open, or of one that is dispatched now."""
        return self.open[group_id].group_size if group_id in self.open else self.rule.group_size

    def dispatch(self, group_id: str, group_size: int | None = None) -> None:
        """Note a group that was sent to rollout, with as many members as the rule says when group_size is absent."""
        assert group_id not in self.ready, f"group {group_id} was dispatched after it finished"
        self.open.setdefault(group_id, OpenGroup(group_id=group_id, group_size=group_size or self.rule.group_size))

    def take_in(self, rows: Iterable[SegmentRow]) -> None:
        """Note segments that were committed. Rows of groups that are not open (decided already) only move the cursor."""
        for row in rows:
            self.cursor = max(self.cursor, row.lsn)
            group = self.open.get(row.group_id)
            if group is not None:
                segments = group.members.setdefault(_member(row.rollout_id), [])
                if all(known.segment_id != row.segment_id for known in segments):
                    segments.append(row)
                    self.heard_of.add(row.group_id)

    def fail(self, group_id: str, member: int) -> None:
        """Note a member that failed for good."""
        group = self.open.get(group_id)
        if group is not None:
            group.failed.add(member)
            self.heard_of.add(group_id)

    def decide(self, policy_version: int) -> list[GroupVerdict]:
        """Move complete groups to ready; return the verdicts of those that are dropped instead.

        Staleness is left to pick: a group that waits may still age.
        """
        dropped = []
        news, self.heard_of = self.heard_of, set()
        for group in [group for group_id, group in self.open.items() if group_id in news]:
            if group.missing:
                continue
            del self.open[group.group_id]
            verdict = self._judge(group, policy_version)
            if verdict.decision in (Decision.ADMITTED, Decision.STALE):
                self.ready[group.group_id] = group
            else:
                dropped.append(verdict)
        return dropped

    def pick(self, num_groups: int, policy_version: int) -> tuple[list[SegmentRow], list[GroupVerdict]]:
        """Take num_groups groups for one step, oldest version first; return their segments and a verdict for each group taken or stale.

        Returns no segments when fewer are ready than asked for; stale ones are dropped all the same.
        """
        verdicts = {gid: self._judge(group, policy_version) for gid, group in self.ready.items()}
        stale = [verdict for verdict in verdicts.values() if verdict.decision == Decision.STALE]
        for verdict in stale:
            del self.ready[verdict.group_id]
        if len(self.ready) < num_groups:
            return [], stale
        chosen = self._oldest(self.ready)[:num_groups]
        segments = [row for gid in chosen for row in self.ready.pop(gid).segments]
        self.num_consumed += len(chosen)
        return segments, stale + [verdicts[gid] for gid in chosen]

    def peek(self, num_groups: int, policy_version: int) -> dict[str, list[SegmentRow]]:
        """Segments of the groups, at most num_groups, that pick would take now if they were enough; nothing changes."""
        fresh = [gid for gid, group in self.ready.items() if self._judge(group, policy_version).decision != Decision.STALE]
        return {gid: self.ready[gid].segments for gid in self._oldest(fresh)[:num_groups]}

    def _oldest(self, group_ids: Iterable[str]) -> list[str]:
        return sorted(group_ids, key=lambda gid: _age(self.ready[gid].segments))

    def _judge(self, group: OpenGroup, policy_version: int) -> GroupVerdict:
        rule, num_failed = replace(self.rule, group_size=group.group_size), len(group.failed - group.members.keys())
        return decide_group(group.group_id, group.segments, num_failed=num_failed, policy_version=policy_version, rule=rule)


def _member(rollout_id: str) -> int:
    return int(rollout_id.split("/")[1])


def _age(segments: list[SegmentRow]) -> tuple[int, int]:
    versions = [row.version_min for row in segments if row.version_min is not None]
    return (min(versions, default=0), max(row.lsn for row in segments))
