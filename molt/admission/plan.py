"""The plan of one step: which segment goes to which rank and micro-batch, fixed before anyone trains."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from molt.admission.balance import balance


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """The scalars of one segment that planning and advantages need. Token columns stay in the log."""

    segment_id: str
    rollout_id: str
    group_id: str
    prompt_index: int
    lsn: int
    n_tokens: int
    n_sampled: int
    version_min: int | None
    version_max: int | None
    reward: float | None
    outcome: float | None
    is_truncated: bool

    @property
    def segment_index(self) -> int:
        """Place of the segment in its rollout: the last part of its name."""
        return int(self.segment_id.rpartition("/")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that a rank needs to train one step, and replay needs to train it again."""

    step: int
    policy_version: int
    seed: int
    segments: tuple[SegmentRow, ...]
    """The whole batch in batch order (group, rollout, then segments as they came about, since discounts run over them): advantages are
    computed over all of it on every rank."""
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch] -> places in segments. Every rank has the same number; an empty one is a dummy of weight 0."""
    n_sampled: int
    """Sampled tokens of the whole batch: the token-mean denominator, fixed before rejection."""
    num_rollouts: int
    num_groups: int
    cursor: int
    """Largest lsn of segments taken in."""


def plan_step(
    segments: list[SegmentRow], *, step: int, policy_version: int, seed: int, num_ranks: int, micro_batch_tokens: int, cursor: int
) -> StepPlan:
    """Plan one step over the segments of its groups, in whatever order they come: the plan depends on their ids alone."""
    ordered = tuple(sorted(segments, key=lambda row: (row.prompt_index, row.group_id, row.rollout_id, row.segment_index)))
    return StepPlan(
        step=step,
        policy_version=policy_version,
        seed=seed,
        segments=ordered,
        micro_batches=balance([row.n_tokens for row in ordered], num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens),
        n_sampled=sum(row.n_sampled for row in ordered),
        num_rollouts=len({row.rollout_id for row in ordered}),
        num_groups=len({row.group_id for row in ordered}),
        cursor=cursor,
    )


def laid_out(plan: StepPlan, *, num_ranks: int, micro_batch_tokens: int) -> StepPlan:
    """The same batch for another number of data shards or another size of micro-batches; the same plan where neither changed."""
    lengths = [row.n_tokens for row in plan.segments]
    return replace(plan, micro_batches=balance(lengths, num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens))


def plan_to_json(plan: StepPlan) -> str:
    """The plan as JSON with sorted keys: equal plans give equal text."""
    return json.dumps(asdict(plan), sort_keys=True, separators=(",", ":"), allow_nan=False)


def plan_from_json(text: str) -> StepPlan:
    """The plan that plan_to_json wrote."""
    fields = json.loads(text)
    fields["segments"] = tuple(SegmentRow(**row) for row in fields["segments"])
    fields["micro_batches"] = tuple(tuple(tuple(batch) for batch in rank) for rank in fields["micro_batches"])
    return StepPlan(**fields)


def plan_digest(text: str) -> str:
    """blake2b-128 hex of the JSON of a plan."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
