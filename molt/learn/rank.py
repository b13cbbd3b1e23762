"""One trainer rank: reads its own rows of a planned step from the log, scores, gates, learns, and says what it did.

    plan -> read own rows -> agree: refuse? -> (score first, where something needs it) -> advantages over the whole batch
         -> per micro-batch: forward, gate, loss, backward -> agree: refuse? -> scores and gates to the log | update -> digests

Ranks run this in step; every line marked "agree" is a collective, so all turn back together. Axes: molt.algo.batch.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from molt.admission.plan import StepPlan
from molt.algo.advantage import Advantages, compute_advantages, get_estimator
from molt.algo.batch import RaggedBatch
from molt.algo.correction import Gate, importance_gate
from molt.algo.kl import kl_estimate, kl_loss
from molt.algo.loss import entropy_loss, policy_loss, token_scale
from molt.algo.reward import shape_rewards
from molt.config import Config
from molt.errors import LineageError, NonFiniteError
from molt.learn import exchange, tally
from molt.learn.journal import Journal
from molt.learn.policy import Policy, Update
from molt.learn.result import RecordedStep, Refusal, RefusalReason, StepResult
from molt.learn.rows import MicroBatch, Row, check_lineage, digest_of, micro_batches, row_digest
from molt.learn.weights import sent_digest


@dataclass(slots=True)
class Columns:
    """Token columns of a rank, one tensor for each of its micro-batches, on the CPU."""

    logprobs: list[torch.Tensor] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    reference: list[torch.Tensor] = field(default_factory=list)
    teacher: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class WholeBatch:
    """What every rank computes alike over the whole batch."""

    advantages: Advantages
    scale_T: torch.Tensor
    offsets: np.ndarray
    metrics: dict[str, float]

    def of(self, column_T: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The tokens of one micro-batch of a column over T. # (N,)"""
        parts = [column_T[self.offsets[p] : self.offsets[p + 1]] for p in batch.places]
        return torch.cat(parts) if parts else column_T[:0]


class PolicyRank:
    """The work of one rank. It holds the policy, and what the algorithm needs beside it."""

    def __init__(self, config: Config, policy: Policy, journal: Journal, *, rank: int) -> None:
        self.config = config
        self.policy = policy
        self.journal = journal
        self.rank = rank
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def train(self, plan: StepPlan, recorded: RecordedStep | None = None) -> StepResult:
        """One step. Every rank returns the same result; a refused step changes neither weights nor optimizer.

        recorded: what the log says of the step, in replay; a difference raises ReplayMismatchError.
        """
        begun = time.monotonic()
        rows, refusal, log_s = self._read(plan)
        if refusal is not None:
            return tally.refused(plan, refusal, train_s=time.monotonic() - begun, log_s=log_s)
        batches = micro_batches(plan, self.rank, rows)
        columns = Columns()
        if self._scores_first():
            columns.logprobs = [self._score(batch) for batch in batches]
        try:
            whole = self._whole_batch(plan, batches, columns)
        except NonFiniteError as error:  # the same on every rank: the inputs are
            return tally.refused(plan, _non_finite(error), train_s=time.monotonic() - begun, log_s=log_s)
        sums = tally.Sums()
        refusal = self._pass(plan, batches, columns, whole, sums)
        total = tally.total(exchange.gather(sums))
        if refusal is None and total.n_kept == 0:
            refusal = Refusal(
                reason=RefusalReason.NOTHING_KEPT, error=f"no trainable token of {plan.n_sampled} sampled is left after the gate"
            )
        digests = self._digests(plan, batches, rows, whole, sums)
        writing = self._write(plan, batches, columns, whole, refusal)
        update = None
        if refusal is None:
            update, refusal = self._update()
        else:
            self.policy.forget_gradient()
        if refusal is None and self.config.train.epochs_per_batch > 1:
            update = self._more_epochs(plan, batches, columns, whole, update)
        weights_digest = self._weights_digest(plan) if refusal is None else None
        log_s += writing.result() if writing is not None else 0.0
        result = tally.result(
            plan,
            total,
            update=update,
            refusal=refusal,
            digests=digests,
            weights_digest=weights_digest,
            metrics=whole.metrics,
            uses=tally.uses(plan, exchange.gather(tally.kept(batches, columns.gates))),
            train_s=time.monotonic() - begun,
            log_s=log_s,
        )
        self.journal.compare_step(plan, result, recorded)
        return result

    def _read(self, plan: StepPlan) -> tuple[dict[int, Row], Refusal | None, float]:
        """Own rows by place, or the refusal that all ranks agree on; seconds in the log."""
        begun = time.monotonic()
        places = exchange.places_of(plan, self.rank)
        rows = dict(zip(places, self.journal.read([plan.segments[p].segment_id for p in places]), strict=True))
        log_s = time.monotonic() - begun
        is_corrected = self.config.algo.advantage.is_correction_level != "off"
        found: Refusal | None = None
        try:
            for place, row in rows.items():
                check_lineage(plan.segments[place], row, is_corrected=is_corrected)
        except LineageError as error:
            found = Refusal(reason=RefusalReason.LINEAGE, error=str(error))
        return rows, exchange.first_refusal(found), log_s

    def _scores_first(self) -> bool:
        """Whether something needs the log-probs of the whole batch before the update."""
        estimator = get_estimator(self.config.algo.advantage.estimator)
        return self.config.train.epochs_per_batch > 1 or bool({"logprobs", "teacher_logprobs"} & estimator.needs) or self._has_kl_reward()

    def _has_kl_reward(self) -> bool:
        return self.config.algo.kl.coef > 0 and self.config.algo.kl.use == "reward"

    def _score(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs without a graph. # (N,)"""
        logprobs, _ = self.policy.score(batch.packed)
        return logprobs.cpu() if not batch.is_dummy else logprobs[:0].cpu()

    def _whole_batch(self, plan: StepPlan, batches: list[MicroBatch], columns: Columns) -> WholeBatch:
        """Advantages and loss scale of the whole batch, alike on every rank."""
        config = self.config
        is_trainable_T = self._gather(plan, [batch.is_trainable_N for batch in batches]) > 0
        batch = RaggedBatch.from_rows(plan.segments, is_trainable_T=is_trainable_T)
        shaped = shape_rewards(batch, config.algo, max_len=config.data.max_len)
        logprobs_T = self._gather(plan, columns.logprobs) if columns.logprobs else None
        kl_T = None
        if self._has_kl_reward() and logprobs_T is not None:
            kl_T = kl_estimate(config.algo.kl.estimator, logprobs_T, self._gather(plan, columns.reference))
        advantages = compute_advantages(
            config.algo.advantage.estimator,
            shaped.batch,
            config.algo,
            kl_T=kl_T,
            values_T=self._gather(plan, columns.values) if columns.values else None,
            logprobs_T=logprobs_T,
            teacher_logprobs_T=self._gather(plan, columns.teacher) if columns.teacher else None,
        )
        return WholeBatch(
            advantages=advantages,
            scale_T=token_scale(config.algo.loss.aggregation, batch),
            offsets=exchange.token_offsets(plan),
            metrics={f"reward_{k}" if k.startswith("num_") else k: v for k, v in shaped.metrics.items()} | advantages.metrics,
        )

    def _gather(self, plan: StepPlan, parts: list[torch.Tensor]) -> torch.Tensor:
        """A column over T from each rank's micro-batches."""
        own = torch.cat([part.float() for part in parts]) if parts else torch.zeros(0)
        return exchange.gather_column(plan, self.rank, own, device=self.policy.device)

    def _pass(self, plan: StepPlan, batches: list[MicroBatch], columns: Columns, whole: WholeBatch, sums: tally.Sums) -> Refusal | None:
        """Forward, gate, loss and backward of every micro-batch; the refusal that all ranks agree on."""
        found: Refusal | None = None
        for number, batch in enumerate(batches):
            logprobs, entropy = self.policy(batch.packed, wants_entropy=True)
            if batch.is_dummy:
                (logprobs.sum() * 0.0).backward()
                columns.gates.append(_empty_gate(self.config))
                if len(columns.logprobs) == number:
                    columns.logprobs.append(torch.zeros(0))
                sums.losses.append(0.0)
                continue
            if len(columns.logprobs) == number:
                columns.logprobs.append(logprobs.detach().cpu())
            try:
                loss = self._loss(plan, number, batch, logprobs, entropy, columns, whole, sums)
            except (LineageError, NonFiniteError) as error:
                reason = RefusalReason.LINEAGE if isinstance(error, LineageError) else RefusalReason.NON_FINITE
                ids = ", ".join(plan.segments[p].segment_id for p in batch.places)
                found = found or Refusal(reason=reason, error=f"rank {self.rank}, micro-batch {number} ({ids}): {error}")
                columns.gates.append(_empty_gate(self.config, columns.logprobs[number], batch))
                loss = logprobs.sum() * 0.0
            sums.losses.append(float(loss.detach()))
            if found is None and not np.isfinite(sums.losses[-1]):
                found = Refusal(reason=RefusalReason.NON_FINITE, error=f"rank {self.rank}, micro-batch {number}: loss {sums.losses[-1]}")
            loss.backward()
        return exchange.first_refusal(found)

    def _loss(
        self,
        plan: StepPlan,
        number: int,
        batch: MicroBatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        columns: Columns,
        whole: WholeBatch,
        sums: tally.Sums,
    ) -> torch.Tensor:
        """Loss of one micro-batch with its graph; gate and sums are noted. Raises LineageError or NonFiniteError."""
        config, device = self.config, logprobs.device
        old_N, row_N = columns.logprobs[number], batch.packed.row_N
        tally.check_finite(plan, batch, old_N)
        gate = importance_gate(
            old_N,
            batch.behaviour_N,
            row_N,
            config.algo,
            num_segments=len(batch.places),
            is_trainable_T=batch.is_trainable_N,
            version_T=batch.version_N,
            trainer_version=plan.policy_version,
        )
        columns.gates.append(gate)
        scale_N = whole.of(whole.scale_T, batch).to(device)
        weights_N = gate.weights_T.to(device)
        output = policy_loss(
            config.algo.loss.name,
            logprobs,
            old_N.to(device),
            whole.of(whole.advantages.advantages_T, batch).to(device),
            weights_N,
            scale_N,
            config.algo,
            segment_T=row_N.to(device),
        )
        loss = output.loss
        if config.algo.loss.entropy_coef != 0:
            loss = loss + entropy_loss(entropy, scale_N, config.algo.loss.entropy_coef)
        if config.algo.kl.coef > 0 and config.algo.kl.use == "loss":
            reference_N = columns.reference[number].to(device)
            loss = loss + config.algo.kl.coef * kl_loss(config.algo.kl.estimator, logprobs, reference_N, scale_N, weights_N)
        sums.add(gate, entropy.detach().cpu(), batch.is_trainable_N, output.metrics)
        return loss

    def _update(self) -> tuple[Update | None, Refusal | None]:
        """One optimizer update, or why not. The gradient norm is over all ranks, so all decide alike."""
        try:
            return self.policy.update(), None
        except NonFiniteError as error:
            return None, exchange.first_refusal(_non_finite(error))

    def _more_epochs(
        self, plan: StepPlan, batches: list[MicroBatch], columns: Columns, whole: WholeBatch, update: Update | None
    ) -> Update | None:
        """Further passes over the same batch against the log-probs of its start. A refused one ends them; what was learned stays."""
        for epoch in range(1, self.config.train.epochs_per_batch):
            again = Columns(logprobs=columns.logprobs, reference=columns.reference)
            refusal = self._pass(plan, batches, again, whole, tally.Sums())
            if refusal is None:
                latest, refusal = self._update()
            if refusal is not None:
                self.policy.forget_gradient()
                whole.metrics["num_refused_epochs"] = float(self.config.train.epochs_per_batch - epoch)
                break
            update = latest
        return update

    def _digests(
        self, plan: StepPlan, batches: list[MicroBatch], rows: dict[int, Row], whole: WholeBatch, sums: tally.Sums
    ) -> tuple[str, str]:
        """Batch digest and loss digest over all ranks."""
        advantages, offsets = whole.advantages.advantages_T.numpy(), whole.offsets
        own = {p: row_digest(rows[p], advantages[offsets[p] : offsets[p + 1]]) for batch in batches for p in batch.places}
        facts: list[tuple[dict[int, str], list[float]]] = exchange.gather((own, sums.losses))
        by_place = {p: digest for found, _ in facts for p, digest in found.items()}
        losses = [np.float32(loss).tobytes().hex() for _, rank_losses in facts for loss in rank_losses]
        return digest_of([by_place[p] for p in range(len(plan.segments)) if p in by_place]), digest_of(losses)

    def _write(
        self, plan: StepPlan, batches: list[MicroBatch], columns: Columns, whole: WholeBatch, refusal: Refusal | None
    ) -> Future[float] | None:
        """Send scores and gates to the log (or compare them with it) while the update runs."""
        if refusal is not None and refusal.reason is RefusalReason.LINEAGE:
            return None
        advantages = [whole.of(whole.advantages.advantages_T, batch) for batch in batches]
        args: tuple[Any, ...] = (
            plan,
            self.rank,
            batches,
            columns.logprobs,
            columns.gates,
            advantages,
            columns.reference,
            columns.teacher,
            columns.values,
        )
        return self._pool.submit(self.journal.scores, *args)

    def _weights_digest(self, plan: StepPlan) -> str | None:
        """Digest of the weights after the step, where it is due."""
        every = self.config.train.weights_digest_interval
        return sent_digest(self.policy) if every and (plan.step + 1) % every == 0 else None


def _non_finite(error: NonFiniteError) -> Refusal:
    return Refusal(reason=RefusalReason.NON_FINITE, error=str(error))


def _empty_gate(config: Config, logprobs_N: torch.Tensor | None = None, batch: MicroBatch | None = None) -> Gate:
    """A gate that keeps nothing: for a dummy, or for a micro-batch that was refused."""
    count = 0 if logprobs_N is None else len(logprobs_N)
    rows = torch.zeros(0, dtype=torch.int64) if batch is None else batch.packed.row_N
    return importance_gate(
        torch.zeros(count),
        torch.zeros(count),
        rows,
        config.algo,
        num_segments=0 if batch is None else len(batch.places),
        is_trainable_T=torch.zeros(count, dtype=torch.bool),
        version_T=torch.zeros(count, dtype=torch.int64),
        trainer_version=0,
    )
