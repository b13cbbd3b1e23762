"""The trainer's leader: it tails the log, decides on groups, keeps prompts in flight and plans each step.

    feed (background)                                     the pipeline's loop
    -----------------                                     -------------------
    finished groups of the pool                           next_plan: waits for enough ready groups, writes the plan
    -> their rows from the tail -> inbox -> decide        record: writes what the step did and what it consumed
    capacity -> dispatch the next prompts
    wakes on: a finished group, a plan, a new version     wakes on: the inbox changed

Both run on one event loop, so the inbox needs no lock. Every wait has a limit that names what was waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from molt.admission.capacity import capacity
from molt.admission.decide import AdmissionRule, Decision, GroupVerdict
from molt.admission.inbox import Inbox
from molt.admission.order import Place, PromptOrder
from molt.admission.plan import SegmentRow, StepPlan, plan_digest, plan_step, plan_to_json
from molt.admission.recover import EVENT_KINDS, SEGMENT_COLUMNS, OpenMember, Standing, check_order, segment_rows, stand
from molt.config import Config
from molt.data.prompts import PromptSet
from molt.driver.facts import attempt_lost, consumption, group_decided, step_trained
from molt.driver.house import House
from molt.errors import StalledError
from molt.learn.result import StepResult
from molt.log.message import Ack
from molt.log.rows import Consumption, Event, event
from molt.rollout.tasks import FinishedGroup, GroupTask

POLL_S = 0.02
"""Longest pause between two looks at the pool."""
MAX_REFUSED = 8
"""Refused steps in a row after which the run stops: more of the same would spend prompts and teach nothing."""
DRAIN_S = 10.0
"""Seconds that rollouts get to end when a run stops."""


class Leader:
    """Owns the inbox and the cursor over prompts of one attempt."""

    def __init__(self, config: Config, *, prompts: PromptSet, house: House, say: Callable[[str], None]) -> None:
        self.config = config
        self.prompts = prompts
        self.order = PromptOrder(num_prompts=len(prompts), seed=config.run.seed)
        self.reader = house.reader
        self.producer = house.producer
        self.pool = house.pool
        self.ranks = house.ranks
        self.say = say
        self._newest: asyncio.Task[Ack] | None = None
        """The newest step on its way into the log."""
        self._announced: set[str] = set()
        """Groups whose rows the ranks were told to read."""
        self._told: list[asyncio.Task[Any]] = []
        """Facts on their way into the log, in order, and work that ends in further ones."""
        self.log_s = 0.0
        """Seconds that the trainer stood still for the log since the newest step was recorded."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint."""
        self.last_failure = "no failure"
        """What the newest failed rollout said."""
        self._dropped_in_row: list[GroupVerdict] = []
        self._refused_in_row = 0
        self.num_recorded = 0
        """Steps trained or refused by this attempt."""
        self.policy_version = 0
        self.is_draining = False
        """Set to dispatch nothing more."""
        self.is_stopped = False
        """The run was stopped by hand before its last step."""
        self.inbox = Inbox(
            rule=AdmissionRule(
                max_lag=config.max_lag,
                group_size=config.rollout.n_samples_per_prompt,
                drop_incomplete=config.admission.incomplete_groups == "drop",
                filter_range=config.algo.reward.filter_range,
            )
        )
        self.position = 0
        self.num_positions = config.train.num_epochs * len(prompts) if config.train.num_steps is None else None
        """Places in the order of prompts that may be dispatched; None is without end."""
        self._segments = self.reader.tail("segments", [*SEGMENT_COLUMNS, "purpose"], after=-1)
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self.evaluated: list[FinishedGroup] = []
        """Finished groups of an evaluation, for whoever waits for them."""
        self.next_step = 0
        """The first step that has no plan."""

    @property
    def lsn_end(self) -> int:
        """Largest lsn when the newest step was recorded: what the weights build on lies at or before it. It must be settled."""
        return -1 if self._newest is None else self._newest.result().lsn_end

    # Where the run stands

    def read_standing(self, from_step: int) -> Standing:
        """Fill inbox and cursor from the log. A fresh run has an empty standing. DataError where the prompts are other ones now."""
        columns = [name for name in SEGMENT_COLUMNS if name != "lsn"]
        cut = self.reader.cut()
        segments = cut.table("segments", ["lsn", *columns], where="purpose = 'train'").sort_by("lsn").to_pylist()
        kinds = ", ".join(f"'{kind}'" for kind in EVENT_KINDS)
        events = cut.table("events", ["lsn", "kind", "body"], where=f"kind in ({kinds})").sort_by("lsn").to_pylist()
        check_order(events, self.order, [prompt.prompt_id for prompt in self.prompts])
        standing = stand(segments, events, inbox=self.inbox, from_step=from_step, num_prompts=len(self.prompts))
        self._segments = self.reader.tail("segments", [*SEGMENT_COLUMNS, "purpose"], after=self.inbox.cursor)
        self.position, self.next_step = standing.position, from_step
        return standing

    async def redispatch(self, members: Sequence[OpenMember]) -> None:
        """Send members of an earlier attempt again that neither finished nor failed; their lost try is an event."""
        await self.producer.append(events=[attempt_lost(member) for member in members])
        by_group: dict[str, list[OpenMember]] = {}
        for member in members:
            by_group.setdefault(member.group_id, []).append(member)
        await self._send(
            [
                self._task(
                    group_id,
                    self.order.place(group[0].epoch * len(self.prompts) + group[0].order_index),
                    tuple(member.member for member in group),
                    first_try=max(member.num_tries for member in group),
                )
                for group_id, group in by_group.items()
            ]
        )

    # Background: rows in, prompts out

    async def feed(self) -> None:
        """Take in, decide and dispatch until cancelled. An error of the pool is raised here."""
        self._take_in()
        while True:
            await self._dispatch()
            self._wake.clear()
            finished = self.pool.ready()
            for group in finished:
                if group.group.purpose == "train":
                    for failed in group.failed:
                        self.inbox.fail(failed.group_id, failed.member)
                        self.last_failure = f"{failed.reason}: {failed.error}"
                else:
                    self.evaluated.append(group)
            if finished:
                self._take_in()
                self._changed.set()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()

    def _take_in(self) -> None:
        rows = [row for row in self._segments.poll().to_pylist() if row.pop("purpose") == "train"]
        self.inbox.take_in(segment_rows(rows))
        num_ready = len(self.inbox.ready)
        dropped = self.inbox.decide(self.policy_version)
        if dropped:
            self.tell(*(group_decided(verdict, self.policy_version) for verdict in dropped))
        if len(self.inbox.ready) > num_ready:
            self._dropped_in_row = []
        self._dropped_in_row += dropped
        self._check_dry_streak()

    def _check_dry_streak(self) -> None:
        """StalledError when only dropped groups came for too long: more of the same would come for ever."""
        dropped, limit = self._dropped_in_row, self.config.admission.max_dropped_groups
        num_failed = sum(verdict.decision in (Decision.FAILED, Decision.INCOMPLETE) for verdict in dropped)
        if num_failed >= min(limit, 2 * self.config.rollout.batch_size):
            raise StalledError(
                f"{num_failed} groups in a row failed and none was admitted; the last rollout failed with {self.last_failure}; "
                "mend the agent or the engine and go on with --resume"
            )
        if len(dropped) >= limit:
            raise StalledError(
                f"admission.max_dropped_groups={limit} groups in a row were dropped, the last as {dropped[-1].decision}: "
                f"{dropped[-1].reason}; widen algo.reward.filter_range, take easier prompts, or raise the limit"
            )

    async def _dispatch(self) -> None:
        if self.is_draining:
            return
        room = capacity(
            max_lag=self.config.max_lag,
            groups_per_version=self.config.rollout.batch_size,
            num_consumed=self.inbox.num_consumed - self.inbox.num_before,
            num_running=self.inbox.num_running,
        )
        if self.config.train.num_steps is not None:
            # By steps to go, not by groups that ever trained: a run may go on with another number of groups in a step.
            num_needed = (self.config.train.num_steps - self.next_step) * self.config.groups_per_step
            room = min(room, num_needed - self.inbox.num_running)
        if self.num_positions is not None:
            room = min(room, self.num_positions - self.position)
        places = [self.order.place(self.position + i) for i in range(max(0, room))]
        self.position += len(places)
        members = tuple(range(self.config.rollout.n_samples_per_prompt))
        await self._send([self._task(place.group_id, place, members) for place in places])

    def _task(self, group_id: str, place: Place, members: tuple[int, ...], first_try: int = 0) -> GroupTask:
        return GroupTask(
            group_id=group_id,
            prompt=self.prompts[place.prompt_index],
            epoch=place.epoch,
            order_index=place.order_index,
            members=members,
            group_size=self.inbox.size_of(group_id),
            first_try=first_try,
        )

    async def _send(self, tasks: Sequence[GroupTask]) -> None:
        for task in tasks:
            self.inbox.dispatch(task.group_id)
        await self.pool.dispatch(*tasks)

    # The pipeline's loop

    @property
    def is_exhausted(self) -> bool:
        """No prompt is left to dispatch and none is running."""
        no_more = self.is_draining or (self.num_positions is not None and self.position >= self.num_positions)
        return no_more and not self.inbox.open

    def serve(self, policy_version: int) -> None:
        """Note which version the engines serve: more may be dispatched where it is a new one."""
        if policy_version != self.policy_version:
            self.inbox.begin_version()
        self.policy_version = policy_version
        self._wake.set()

    async def next_plan(
        self, step: int, *, num_ranks: int, is_stopped: Callable[[], bool], meanwhile: Callable[[], Awaitable[None]]
    ) -> StepPlan | None:
        """Wait for the groups of one step and write its plan; None when no prompt is left or the run is being stopped.

        The last step of the last epoch takes what there is. meanwhile: called at every look, as long as it waits; the ranks are idle
        then. Raises StalledError past train.step_timeout_s.
        """
        limit_s = self.config.train.step_timeout_s
        began = time.monotonic()
        while not is_stopped():
            self._changed.clear()
            exhausted = self.is_exhausted
            num_groups = self.config.groups_per_step
            if exhausted:
                num_groups = min(num_groups, len(self.inbox.ready))
            if exhausted and num_groups == 0:
                return None
            segments, verdicts = self.inbox.pick(num_groups, self.policy_version)
            if segments:
                return self._plan(step, segments, verdicts, num_ranks)
            if verdicts:
                self.tell(*(group_decided(verdict, self.policy_version) for verdict in verdicts))
            if time.monotonic() - began > limit_s:
                await self._stalled(limit_s)
            await meanwhile()
            self.announce(step, self.policy_version, num_ranks=num_ranks)
            self.say(self.waiting_for())
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._changed.wait()
        return None

    def waiting_for(self) -> str:
        """What the trainer waits for, in words."""
        ready, need = len(self.inbox.ready), self.config.groups_per_step
        return f"waiting for rollouts: {ready} of {need} groups ready, {len(self.inbox.open)} running; {self.pool.describe()}"

    async def _stalled(self, limit_s: float) -> None:
        what = self.waiting_for()
        await self.producer.append(
            events=[event("wait_ended_badly", what="rollouts", who="trainer", limit_s=limit_s, detail=self.pool.describe())]
        )
        raise StalledError(f"train.step_timeout_s={limit_s:g} passed while {what}; raise the limit or look at the suspect named here")

    def announce(self, step: int, policy_version: int, *, num_ranks: int) -> None:
        """Let the ranks read what the plan of that step will most likely hold. Several are told of a whole step only: who gets which
        rows is not known before."""
        groups = self.inbox.peek(self.config.groups_per_step, policy_version)
        if groups and groups.keys() != self._announced and (num_ranks == 1 or len(groups) == self.config.groups_per_step):
            self._announced = set(groups)
            rows = [row for segments in groups.values() for row in segments]
            self.ranks.expect(self._plan_of(rows, step, policy_version, num_ranks))

    def _plan(self, step: int, segments: list[SegmentRow], verdicts: list[GroupVerdict], num_ranks: int) -> StepPlan:
        plan = self._plan_of(segments, step, self.policy_version, num_ranks)
        self.write_plan(plan, verdicts)
        self._wake.set()
        return plan

    def _plan_of(self, segments: list[SegmentRow], step: int, policy_version: int, num_ranks: int) -> StepPlan:
        return plan_step(
            segments,
            step=step,
            policy_version=policy_version,
            seed=self.config.run.seed * 1_000_003 + step,
            num_ranks=num_ranks,
            micro_batch_tokens=self.config.train.micro_batch_tokens,
            cursor=self.inbox.cursor,
        )

    def write_plan(self, plan: StepPlan, verdicts: Sequence[GroupVerdict] = ()) -> None:
        """Tell a plan and the admissions that it rests on, in one message; ranks read its rows meanwhile."""
        self.ranks.expect(plan)
        self.next_step = plan.step + 1
        text = plan_to_json(plan)
        planned = event(
            "batch_planned",
            step=plan.step,
            policy_version=plan.policy_version,
            plan=text,
            plan_digest=plan_digest(text),
            groups=sorted({row.group_id for row in plan.segments}),
            num_segments=len(plan.segments),
            num_rollouts=plan.num_rollouts,
            n_sampled=plan.n_sampled,
            seed=plan.seed,
            cursor=plan.cursor,
        )
        self.tell(*(group_decided(verdict, self.policy_version) for verdict in verdicts), planned)

    def tell(self, *events: Event, consumption: Sequence[Consumption] = ()) -> asyncio.Task[Ack]:
        """Send facts as one message and go on. They are in the log in the order told, the last of them when settled() returns."""
        sending = asyncio.create_task(self.producer.append(events=events, consumption=consumption, is_urgent=True))
        self._told.append(sending)
        return sending

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Let work go on that tells facts when it is done: settled() waits for it, and for them."""
        self._told.append(asyncio.create_task(work))

    async def settled(self) -> None:
        """Return once everything told is in the log; the first error that kept something out is raised."""
        while told := list(self._told):
            await asyncio.wait(told)  # a message is neither cancelled with its waiter nor left alone after the first that failed
            self._told = [task for task in self._told if task not in told]
            for sending in told:
                sending.result()

    async def hold(self) -> None:
        """settled(), its seconds counted as those of the log: something stands still for it."""
        began = time.monotonic()
        await self.settled()
        self.log_s += time.monotonic() - began

    def record(self, plan: StepPlan, result: StepResult, *, wait_s: float) -> None:
        """Tell what a step did: step_trained and its consumption in one message, or step_refused. The cursor goes with it."""
        if result.refused is not None:
            refused = event(
                "step_refused",
                step=plan.step,
                policy_version=plan.policy_version,
                reason=result.refused.reason.value,
                error=result.refused.error,
                n_sampled=plan.n_sampled,
            )
            self._newest = self.tell(refused)
            self._refused_in_row += 1
        else:
            self._refused_in_row = 0
            self._newest = self.tell(step_trained(result, wait_s=wait_s), consumption=consumption(plan, result))
        self.num_recorded += 1
        if result.refused is not None and self._refused_in_row >= MAX_REFUSED:
            raise StalledError(
                f"{self._refused_in_row} steps in a row were refused and the weights stand still; the last one at step {plan.step}, "
                f"{result.refused.reason}: {result.refused.error}"
            )

    def figures(self, plan: StepPlan, result: StepResult, *, wait_s: float) -> dict[str, Any]:
        """What is shown of a step."""
        lags = [plan.policy_version - row.version_min for row in plan.segments if row.version_min is not None]
        return {
            "step": plan.step,
            "version": plan.policy_version,
            "reward": result.reward_mean,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "kl": result.kl_mean,
            "n_sampled": plan.n_sampled,
            "n_kept": result.n_kept,
            "lag": max(lags, default=0),
            "ready": len(self.inbox.ready),
            "running": len(self.inbox.open),
            "train_s": result.train_s,
            "log_s": result.log_s,
            "wait_s": wait_s,
            "refused": None if result.refused is None else result.refused.reason.value,
        }

    async def drain(self) -> None:
        """Dispatch nothing more and end what runs: at the end of a run nothing does, at a stop it is cancelled with an event each."""
        self.is_draining = True
        await self.pool.drain(DRAIN_S)
        self._take_in()
