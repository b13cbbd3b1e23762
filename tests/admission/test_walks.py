"""Random runs of inbox and recovery, killed anywhere: every prompt is trained or dropped once, and none is older than the bound."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from molt.admission.capacity import capacity
from molt.admission.decide import AdmissionRule, Decision, GroupVerdict
from molt.admission.inbox import Inbox
from molt.admission.order import PromptOrder
from molt.admission.plan import plan_from_json, plan_step, plan_to_json
from molt.admission.recover import segment_rows, stand

NUM_ATTEMPTS = 20
"""The last of them is not killed."""


class Killed(Exception):
    """The attempt dies here; what is not in the log is gone."""


class Walk:
    """A log, and what the attempts of one run do with it."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.size, self.groups_per_step = chance.randint(1, 3), chance.randint(1, 3)
        self.rule = AdmissionRule(
            max_lag=chance.randint(0, 2),
            group_size=self.size,
            drop_incomplete=chance.random() < 0.5,
            filter_range=chance.choice([None, (0.0, 1.0)]),
        )
        self.order = PromptOrder(num_prompts=chance.randint(1, 14), seed=1)
        self.num_positions = self.order.num_prompts * chance.randint(1, 2)
        self.events: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.lsn = 0
        self.saved = (0, 0)
        """Step and version of the newest checkpoint."""
        self.is_last = False

    def may_die(self) -> None:
        if not self.is_last and self.chance.random() < 0.03:
            raise Killed

    def tell(self, kind: str, **body: Any) -> None:
        self.events.append({"lsn": self.lsn, "kind": kind, "body": json.dumps(body)})
        self.lsn += 1

    def tell_verdicts(self, verdicts: list[GroupVerdict]) -> None:
        for verdict in verdicts:
            self.tell("group_decided", group_id=verdict.group_id, decision=verdict.decision.value)

    def attempt(self) -> None:
        """Take up what the log says, then go on to the last prompt."""
        self.inbox = Inbox(rule=self.rule)
        self.step, self.version = self.saved
        standing = stand(self.segments, self.events, inbox=self.inbox, from_step=self.step, num_prompts=self.order.num_prompts)
        self.position = standing.position
        for plan in standing.plans:
            assert plan.step == self.step
            self.tell("batch_planned", plan=plan_to_json(plan))
            self.step, self.version = plan.step + 1, max(self.version, plan.policy_version) + 1
            self.may_die()
        self.inbox.begin_version()
        self.running = [(member.group_id, member.member, member.num_tries) for member in standing.open_members]
        while not self.is_over():
            self.dispatch()
            self.end_some()
            self.tell_verdicts(self.decided())
            self.train()

    def is_over(self) -> bool:
        return self.position >= self.num_positions and not self.inbox.open and not self.inbox.ready

    def dispatch(self) -> None:
        room = capacity(
            max_lag=self.rule.max_lag,
            groups_per_version=self.groups_per_step,
            num_consumed=self.inbox.num_consumed - self.inbox.num_before,
            num_running=self.inbox.num_running,
        )
        for _ in range(min(room, self.num_positions - self.position)):
            place = self.order.place(self.position)
            self.position += 1
            self.inbox.dispatch(place.group_id)
            where = {"epoch": place.epoch, "order_index": place.order_index, "prompt_index": place.prompt_index, "prompt_id": "p"}
            self.tell("group_dispatched", group_id=place.group_id, purpose="train", group_size=self.size, **where)
            self.running += [(place.group_id, member, 0) for member in range(self.size)]
        self.may_die()

    def end_some(self) -> None:
        """Some rollouts end, a few of them for good, the others with one segment or two."""
        self.chance.shuffle(self.running)
        num_ended = self.chance.randint(0, len(self.running))
        ended, self.running = self.running[:num_ended], self.running[num_ended:]
        for group_id, member, num_tries in ended:
            if self.chance.random() < 0.15:
                self.tell("rollout_failed", group_id=group_id, member=member, num_tries=num_tries + 1, is_final=True)
                self.inbox.fail(group_id, member)
                continue
            rollout_id, reward = f"{group_id}/{member}/{num_tries}", self.chance.choice([None, 0.0, 1.0])
            rows = [self.row(rollout_id, index, reward) for index in range(self.chance.randint(1, 2))]
            self.segments += rows
            self.inbox.take_in(segment_rows(rows))

    def row(self, rollout_id: str, index: int, reward: float | None) -> dict[str, Any]:
        self.lsn += 1
        group_id = rollout_id.split("/")[0]
        return {
            "segment_id": f"{rollout_id}/{index}", "rollout_id": rollout_id, "group_id": group_id, "lsn": self.lsn - 1,
            "prompt_index": int(group_id.split("p")[1]), "n_tokens": 3, "n_sampled": 2, "reward": reward, "outcome": None,
            "version_min": max(0, self.version - self.chance.choice([0, 0, 1, 3])), "version_max": self.version, "is_truncated": False,
        }  # fmt: skip

    def decided(self) -> list[GroupVerdict]:
        dropped = self.inbox.decide(self.version)
        self.may_die()
        return dropped

    def train(self) -> None:
        is_exhausted = self.position >= self.num_positions and not self.inbox.open
        num_groups = min(self.groups_per_step, len(self.inbox.ready)) if is_exhausted else self.groups_per_step
        segments, verdicts = self.inbox.pick(num_groups, self.version) if num_groups else ([], [])
        self.may_die()
        self.tell_verdicts(verdicts)
        if not segments:
            return
        assert all(self.version - row.version_min <= self.rule.max_lag for row in segments if row.version_min is not None)
        plan = plan_step(
            segments, step=self.step, policy_version=self.version, seed=0, num_ranks=1, micro_batch_tokens=9, cursor=self.inbox.cursor
        )
        self.tell("batch_planned", plan=plan_to_json(plan))
        self.step, self.version = self.step + 1, self.version + 1
        self.inbox.begin_version()
        if self.chance.random() < 0.3:
            self.saved = self.step, self.version


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_prompt_is_trained_or_dropped_once_however_often_the_run_is_killed(first: int) -> None:
    num_killed = 0
    for seed in range(first, first + 50):
        walk = Walk(seed)
        for number in range(NUM_ATTEMPTS):
            walk.is_last = number == NUM_ATTEMPTS - 1
            try:
                walk.attempt()
                break
            except Killed:
                num_killed += 1
        told = [(row["kind"], json.loads(row["body"])) for row in walk.events]
        plans = {plan.step: plan for plan in (plan_from_json(body["plan"]) for kind, body in told if kind == "batch_planned")}
        ends = Counter(group_id for plan in plans.values() for group_id in {row.group_id for row in plan.segments})
        ends.update({body["group_id"] for kind, body in told if kind == "group_decided" and body["decision"] != Decision.ADMITTED})
        assert ends == Counter(walk.order.place(position).group_id for position in range(walk.num_positions)), seed
        assert sorted(plans) == list(range(walk.step))
    assert num_killed > 50
