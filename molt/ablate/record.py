"""The scored steps of a run, read back from its log one batch at a time: what every offline tool starts from.

    scalars of scores (row id, step, segment)  ->  per step: its plan, its segments, its scores  ->  ScoredStep
    memory holds the scalars of the log and one batch; tokens of other steps are never in it

Axes: molt.algo.batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from molt.ablate.place import Place, open_cut
from molt.admission.plan import StepPlan, plan_from_json
from molt.algo.batch import RaggedBatch
from molt.config import Config
from molt.errors import DataError, LogError
from molt.log.batch import one_batch, verify_rows
from molt.log.cut import Cut

COLUMNS = ("trainer_logprobs", "reference_logprobs", "teacher_logprobs", "values", "advantages", "gate_weights")
KINDS = ("attempt_started", "batch_planned", "step_trained", "step_refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """One recorded batch with everything that the algorithm reads. Token columns are float32 over T unless said otherwise."""

    plan: StepPlan
    batch: RaggedBatch
    """Under the agent's own rewards, not yet shaped."""
    trainer_logprobs_T: torch.Tensor
    behaviour_logprobs_T: torch.Tensor
    version_T: torch.Tensor
    """int64: policy version that sampled the token."""
    columns: Mapping[str, torch.Tensor | None]
    """The other columns of scores by name; None where the run has none."""

    @property
    def step(self) -> int:
        """Optimizer step."""
        return self.plan.step


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A recorded step that cannot be used, and why."""

    step: int
    reason: str


class ScoredRun:
    """A run's settings and its scored steps as of one cut. A step that a later attempt trained again counts once, as trained last."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        events = cut.table("events", ["kind", "attempt", "body"], where="kind in (" + ", ".join(f"'{kind}'" for kind in KINDS) + ")")
        self._plans: dict[int, StepPlan] = {}
        self.outcomes: dict[int, dict[str, Any]] = {}
        """step_trained or step_refused of each step, newest attempt first in force."""
        started: dict[int, dict[str, Any]] = {}
        for row in events.to_pylist():
            body = json.loads(row["body"])
            match row["kind"]:
                case "attempt_started":
                    started[row["attempt"]] = body
                case "batch_planned":
                    self._plans[body["step"]] = plan_from_json(body["plan"])
                case _:
                    self.outcomes[body["step"]] = body
        if not started:
            raise DataError("the log holds no attempt_started event; the run did not begin")
        self._configs = {attempt: body["config"] for attempt, body in started.items()}
        self.config = Config.model_validate_json(self._configs[max(started)])
        """Of the newest attempt."""
        self._scored_by: dict[int, int] = {}
        """Attempt whose scores of a step count."""
        self._first_steps = {attempt: body["resumed_from_step"] or 0 for attempt, body in started.items()}
        self._rows = self._index()
        self.skipped: list[SkippedStep] = []
        """Filled while steps() runs."""

    @classmethod
    def open(cls, run_dir: Path, *, at: Place = None) -> ScoredRun:
        """The run in a folder, as it is, up to an lsn, or as pinned."""
        return cls(open_cut(run_dir, at))

    def config_of(self, step: int) -> Config:
        """Settings that a scored step was made with: those of its attempt, which a resumed run may have changed."""
        text = self._configs[self._scored_by[step]]
        return self.config if text == self._configs[max(self._configs)] else Config.model_validate_json(text)

    @property
    def steps_scored(self) -> list[int]:
        """Steps that have a plan and scores, in order."""
        return sorted(set(self._rows) & set(self._plans))

    def steps(self, wanted: Mapping[int, object] | set[int] | None = None) -> Iterator[ScoredStep]:
        """The scored steps in order, one batch in memory at a time; those that cannot be used go to `skipped`."""
        self.skipped.clear()
        for step in self.steps_scored:
            if wanted is not None and step not in wanted:
                continue
            found = self._read(step)
            if isinstance(found, SkippedStep):
                self.skipped.append(found)
            else:
                yield found

    def _index(self) -> dict[int, dict[str, int]]:
        """Row id of the score that counts, by step and segment."""
        scanned = self.cut.dataset("scores").scanner(
            columns=["lsn", "attempt", "step", "segment_id"], filter=f"lsn <= {self.cut.lsn}", with_row_id=True
        )
        rows = scanned.to_table().sort_by("lsn")
        found: dict[int, dict[str, int]] = {}
        names = ("attempt", "step", "segment_id", "_rowid")
        for attempt, step, segment_id, row_id in zip(*(rows[name].to_pylist() for name in names), strict=True):
            if all(later <= attempt or step < first for later, first in self._first_steps.items()):
                found.setdefault(step, {})[segment_id] = row_id
                self._scored_by[step] = attempt
        return found

    def _read(self, step: int) -> ScoredStep | SkippedStep:
        plan, row_ids = self._plans[step], self._rows[step]
        ids = [row.segment_id for row in plan.segments]
        missing = [name for name in ids if name not in row_ids]
        if missing:
            return SkippedStep(step=step, reason=f"{len(missing)} of {len(ids)} segments have no score, first {missing[0]}")
        dataset = self.cut.dataset("scores")
        scores = one_batch(dataset._take_rows([row_ids[name] for name in ids]))
        if any(count and not held for count, held in zip(_counts(scores, "n_sampled"), _lengths(scores, "trainer_logprobs"), strict=True)):
            return SkippedStep(step=step, reason="its scores were taken out of the log (rows_emptied)")
        verify_rows(scores, f"{dataset.uri}: version {dataset.version}")
        try:
            segments = self.cut.segments(ids)
        except LogError as error:
            return SkippedStep(step=step, reason=str(error))
        sampled_T = segments.is_sampled_T
        columns = {name: _column(scores, name) for name in COLUMNS}
        trainer_T, behaviour_T = columns.pop("trainer_logprobs"), torch.from_numpy(segments.behaviour_logprobs_T[sampled_T])
        trainable_T = torch.from_numpy(segments.is_trainable_T[sampled_T])
        if trainer_T is None or len(trainer_T) != len(behaviour_T) or len(trainer_T) != plan.n_sampled:
            return SkippedStep(step=step, reason=f"scores and segments disagree on the number of sampled tokens ({plan.n_sampled})")
        if not bool((torch.isfinite(trainer_T) & torch.isfinite(behaviour_T))[trainable_T].all()):
            return SkippedStep(step=step, reason="a log-prob of a trainable token is not finite")
        return ScoredStep(
            plan=plan,
            batch=RaggedBatch.from_rows(plan.segments, is_trainable_T=trainable_T),
            trainer_logprobs_T=trainer_T,
            behaviour_logprobs_T=behaviour_T,
            version_T=torch.from_numpy(segments.policy_version_T[sampled_T].astype(np.int64)),
            columns=columns,
        )


def _counts(rows: pa.RecordBatch, name: str) -> list[int]:
    counts: list[int] = rows[name].to_pylist()
    return counts


def _lengths(rows: pa.RecordBatch, name: str) -> list[int]:
    lengths: list[int] = rows[name].value_lengths().to_pylist()
    return lengths


def _column(rows: pa.RecordBatch, name: str) -> torch.Tensor | None:
    """A list column over T as float32 with NaN for null; None when any list is null."""
    column = rows[name]
    if column.null_count:
        return None
    values = column.flatten()
    return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False), dtype=np.float32))
