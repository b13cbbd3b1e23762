"""What a log tells of timing: when each group was sent and finished, with which versions, and how long each step took."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molt.ablate.place import Place, open_cut
from molt.admission.decide import AdmissionRule
from molt.admission.plan import SegmentRow
from molt.admission.recover import SEGMENT_COLUMNS, segment_rows
from molt.config import Config
from molt.errors import DataError

KINDS = ("attempt_started", "group_dispatched", "rollout_failed", "batch_planned", "step_trained", "step_refused", "weights_refit")


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRollout:
    """One finished rollout: how long it waited for a place, and how long it held it."""

    rollout_id: str
    wait_s: float
    model_s: float
    """Spent in model calls, as far as rollouts of the same version tell."""
    tool_s: float
    """The rest: tools and agent code."""
    num_turns: int
    """Model calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastGroup:
    """One finished group of prompts."""

    group_id: str
    dispatched_at: float
    finished_at: float
    """When its last member ended."""
    version_dispatched: int
    """Policy version in force when it was sent."""
    segments: tuple[SegmentRow, ...]
    rollouts: tuple[PastRollout, ...]
    num_failed: int
    """Members that failed for good."""

    @property
    def n_sampled(self) -> int:
        """Sampled tokens of its finished rollouts."""
        return sum(row.n_sampled for row in self.segments)

    @property
    def num_rollouts(self) -> int:
        """Finished rollouts."""
        return len({row.rollout_id for row in self.segments})

    @property
    def reward(self) -> float | None:
        """Mean reward over scored rollouts."""
        scored = list({row.rollout_id: row.reward for row in self.segments if row.reward is not None}.values())
        return sum(scored) / len(scored) if scored else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastStep:
    """One step that was planned and ended."""

    step: int
    policy_version: int
    planned_at: float
    duration_s: float
    """Seconds from its plan until the engines served what followed from it."""
    train_s: float
    """Seconds from its plan until it was trained."""
    refit_s: float
    """Seconds in which the engines took its weights, without the wait for calls that ran; 0 when none were sent."""
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Groups in the order of dispatch and steps in order, of all attempts together."""

    config: Config
    groups: tuple[PastGroup, ...]
    steps: tuple[PastStep, ...]
    num_places: int
    """Rollouts that can run at the same time."""
    start_s: float
    """Seconds from dispatch to the start of a rollout that finds a place free."""
    num_open: int
    """Groups that neither finished nor failed; they are left out."""

    @property
    def groups_per_step(self) -> int:
        """Groups of a full step."""
        return max((step.num_groups for step in self.steps), default=self.config.groups_per_step)

    @property
    def steps_per_version(self) -> int:
        """Steps from one refit to the next."""
        return max(1, self.config.rollout.batch_size // max(1, self.config.groups_per_step))

    @property
    def is_partial(self) -> bool:
        """Refits do not wait for model calls."""
        return self.config.train.partial_rollout_enable

    def phases(self, rollout: PastRollout) -> Iterator[tuple[bool, float]]:
        """(whether the model is called, seconds): as many calls as it made, tools and agent code between them, all alike."""
        turns = max(1, rollout.num_turns)
        for _ in range(turns):
            yield True, rollout.model_s / turns
            yield False, rollout.tool_s / turns

    def rule(self, max_lag: int, filter_range: tuple[float, float] | None) -> AdmissionRule:
        """The run's rule of admission under another bound and filter."""
        return AdmissionRule(
            max_lag=max_lag,
            group_size=self.config.rollout.n_samples_per_prompt,
            drop_incomplete=self.config.admission.incomplete_groups == "drop",
            filter_range=filter_range,
        )


def read_history(run_dir: Path, *, at: Place = None) -> History:
    """Read scalars and events of a run; no token column is touched. DataError when nothing was trained."""
    cut = open_cut(run_dir, at)
    columns = [*SEGMENT_COLUMNS, "started_at", "finished_at", "num_turns"]
    table = cut.table("segments", columns, where="purpose = 'train'").to_pylist()
    kinds = ", ".join(f"'{kind}'" for kind in KINDS)
    events = cut.table("events", ["kind", "happened_at", "policy_version", "body"], where=f"kind in ({kinds})").to_pylist()
    facts: dict[str, list[tuple[float, int | None, dict[str, Any]]]] = defaultdict(list)
    for row in events:
        facts[row["kind"]].append((row["happened_at"], row["policy_version"], json.loads(row["body"])))
    if not facts["attempt_started"]:
        raise DataError("the log holds no attempt_started event; the run did not begin")
    config = Config.model_validate_json(facts["attempt_started"][-1][2]["config"])
    steps = _steps(facts)
    if not steps:
        raise DataError(f"run={run_dir.name}: no step was trained, so there is no timing to simulate from")
    groups, num_open = _groups(facts, table, config)
    waits = [min(rollout.wait_s for rollout in group.rollouts) for group in groups if group.rollouts]
    return History(
        config=config,
        groups=tuple(groups),
        steps=tuple(steps),
        num_places=config.rollout.num_workers * config.rollout.max_concurrency,
        start_s=float(np.quantile(waits, 0.25)) if waits else 0.0,
        num_open=num_open,
    )


def _groups(
    facts: dict[str, list[tuple[float, int | None, dict[str, Any]]]], table: list[dict[str, Any]], config: Config
) -> tuple[list[PastGroup], int]:
    rows: dict[str, list[SegmentRow]] = defaultdict(list)
    ended: dict[str, float] = defaultdict(float)
    spans: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    turns: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    for raw, row in zip(table, segment_rows(table), strict=True):
        rows[row.group_id].append(row)
        spans[row.group_id][row.rollout_id] = (raw["started_at"], raw["finished_at"])
        turns[row.rollout_id] += raw["num_turns"]
        sampled[row.rollout_id] += row.n_sampled
        ended[row.group_id] = max(ended[row.group_id], raw["finished_at"])
    failed: dict[str, set[int]] = defaultdict(set)
    for happened_at, _, body in facts["rollout_failed"]:
        if body["is_final"]:
            failed[body["group_id"]].add(body["member"])
            ended[body["group_id"]] = max(ended[body["group_id"]], happened_at)
    first: dict[str, tuple[float, int]] = {}
    for happened_at, version, body in facts["group_dispatched"]:
        if body["purpose"] == "train":
            first.setdefault(body["group_id"], (happened_at, version or 0))
    model_s = _model_times(first, spans, sampled)
    found, num_open = [], 0
    for group_id, (dispatched_at, version) in sorted(first.items(), key=lambda item: item[1][0]):
        members = {row.rollout_id.split("/")[1] for row in rows[group_id]} | {str(member) for member in failed[group_id]}
        if len(members) < config.rollout.n_samples_per_prompt and not _is_complete(rows[group_id], failed[group_id]):
            num_open += 1
            continue
        found.append(
            PastGroup(
                group_id=group_id,
                dispatched_at=dispatched_at,
                finished_at=ended[group_id],
                version_dispatched=version,
                segments=tuple(rows[group_id]),
                rollouts=tuple(
                    PastRollout(
                        rollout_id=name,
                        wait_s=max(0.0, start - dispatched_at),
                        model_s=model_s[name],
                        tool_s=max(0.0, end - start - model_s[name]),
                        num_turns=turns[name],
                    )
                    for name, (start, end) in spans[group_id].items()
                ),
                num_failed=len(failed[group_id]),
            )
        )
    return found, num_open


def _model_times(
    first: dict[str, tuple[float, int]], spans: dict[str, dict[str, tuple[float, float]]], sampled: Counter[str]
) -> dict[str, float]:
    """Seconds of each rollout in model calls. The log times rollouts, not calls, and engines are not equally fast at all times: up to
    half more than what two in five rollouts of the same version take, by rollout or by token, is held for model time; the rest for tools.
    """
    by_version: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for group_id, rollouts in spans.items():
        for name, (start, end) in rollouts.items():
            by_version[first[group_id][1] if group_id in first else 0].append((name, max(0.0, end - start)))
    found = {}
    for rollouts_of in by_version.values():
        usual_s = 1.5 * float(np.quantile([seconds for _, seconds in rollouts_of], 0.4))
        usual_token_s = 1.5 * float(np.quantile([seconds / max(1, sampled[name]) for name, seconds in rollouts_of], 0.4))
        found.update({name: min(seconds, max(usual_s, sampled[name] * usual_token_s)) for name, seconds in rollouts_of})
    return found


def _is_complete(rows: list[SegmentRow], failed: set[int]) -> bool:
    """A group that was trained although smaller than the settings say (a made or imported log) counts as finished."""
    return bool(rows) and not failed


def _steps(facts: dict[str, list[tuple[float, int | None, dict[str, Any]]]]) -> list[PastStep]:
    """Steps as trained last. A step ends with the refit that followed it, or with its own event."""
    planned: dict[int, tuple[float, dict[str, Any]]] = {}
    for happened_at, _, body in facts["batch_planned"]:
        planned[body["step"]] = (happened_at, body)
    trained: dict[int, float] = {}
    for kind in ("step_trained", "step_refused"):
        for happened_at, _, body in facts[kind]:
            if body["step"] in planned and happened_at >= planned[body["step"]][0]:
                trained[body["step"]] = happened_at
    refits: dict[int, tuple[float, dict[str, Any]]] = {}
    for happened_at, _, body in facts["weights_refit"]:
        if body["step"] in trained and happened_at >= trained[body["step"]]:
            refits[body["step"]] = (happened_at, body)
    steps = []
    for step, (planned_at, body) in sorted(planned.items()):
        if step not in trained:
            continue
        served_at, refit = refits.get(step, (trained[step], None))
        # What lies between the end of training and the refit's own pause (publishing weights) belongs to the training.
        took_s = sum(refit[name] for name in ("pause_s", "transfer_s", "verify_s", "resume_s")) if refit else 0.0
        steps.append(
            PastStep(
                step=step,
                policy_version=body["policy_version"],
                planned_at=planned_at,
                duration_s=served_at - planned_at,
                train_s=max(0.0, served_at - took_s - planned_at),
                refit_s=took_s - refit["pause_s"] if refit else 0.0,
                num_groups=len(body["groups"]),
            )
        )
    return steps
