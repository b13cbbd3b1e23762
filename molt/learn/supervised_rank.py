"""A rank that learns demonstrations: the same step, with target tokens in place of sampled ones and no gate.

Targets are the trainable tokens of supervised rows. The loss is the mean negative log-prob over all targets of the step, over
every micro-batch and every rank: whoever holds few of them weighs little.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace

import torch

from molt.admission.plan import StepPlan
from molt.algo.advantage import Advantages
from molt.algo.correction import importance_gate
from molt.learn import exchange, tally
from molt.learn.journal import Write
from molt.learn.rank import PolicyRank
from molt.learn.result import Refusal
from molt.learn.rows import Row, micro_batches
from molt.learn.step import Step, WholeBatch


class SupervisedRank(PolicyRank):
    """One rank of supervised steps. n_sampled in its plans counts target tokens."""

    @property
    def is_corrected(self) -> bool:
        """Never: nobody sampled a demonstration, so there is nothing to correct, whatever the settings are for runs that sample."""
        return False

    def read(self, segment_ids: list[str]) -> list[Row]:
        """Rows of the log with their targets where the policy's ranks look for sampled tokens."""
        return [replace(row, is_sampled=row.is_trainable) for row in self.journal.read(segment_ids)]

    def evaluate(self, plan: StepPlan) -> float:
        """Mean negative log-prob over the targets of a plan; nothing learns. A collective."""
        places = exchange.places_of(plan, self.rank)
        rows = dict(zip(places, self.read([plan.segments[p].segment_id for p in places]), strict=True))
        own = [float(self._score(batch).double().sum()) for batch in micro_batches(plan, self.rank, rows)]
        return -math.fsum(math.fsum(part) for part in exchange.gather(own, self.group_size)) / plan.n_sampled

    def _whole_batch(self, step: Step) -> WholeBatch:
        count = step.plan.n_sampled
        ones_T = torch.ones(count)
        return WholeBatch(
            advantages=Advantages(advantages_T=ones_T, returns_T=None, is_counted_T=ones_T > 0, metrics={}),
            scale_T=ones_T / max(count, 1),
            offsets=exchange.token_offsets(step.plan),
            metrics={},
        )

    def _loss(self, step: Step, number: int, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        batch = step.batches[number]
        own_N = step.columns.logprobs[number]
        tally.check_finite(step.plan, batch, own_N)
        # Nobody sampled a demonstration, so there is no ratio: the gate sees the same log-probs twice and keeps everything.
        gate = importance_gate(own_N, own_N, batch.packed.row_N, step.algo, num_segments=len(batch.places))
        step.columns.gates.append(gate)
        scale_N = step.known.scale_of(batch).to(logprobs.device)
        step.sums.note(gate, entropy.detach(), batch.is_trainable_N, {})
        return -(scale_N * logprobs).sum()

    def _write(self, step: Step, refusal: Refusal | None) -> Future[Write] | None:
        """Nothing: a demonstration has no behaviour to compare with, so it has neither scores nor gate decisions."""
        return None
