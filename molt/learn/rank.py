"""One trainer rank: reads its own rows of a planned step from the log, scores, gates, learns, and says what it did.

    plan -> read own rows -> agree: refuse? -> (score first, where something needs it) -> advantages over the whole batch
         -> per micro-batch: forward, gate, loss, backward -> agree: refuse? -> scores and gates to the log | update -> digests

Ranks run this in step; every line marked "agree" is a collective, so all turn back together. Axes: molt.algo.batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from molt.admission.plan import StepPlan
from molt.algo.advantage import compute_advantages, get_estimator
from molt.algo.batch import RaggedBatch
from molt.algo.correction import importance_gate
from molt.algo.kl import kl_estimate, kl_loss, next_coefficient
from molt.algo.loss import entropy_loss, policy_loss, token_scale
from molt.algo.reward import shape_rewards
from molt.config import Config
from molt.errors import LineageError, NonFiniteError
from molt.learn import exchange, tally
from molt.learn.beside import Beside, is_distilled, needs_critic, needs_frozen, vocab_size
from molt.learn.journal import Journal, Outgoing, Write
from molt.learn.policy import Policy, Update
from molt.learn.result import RecordedStep, Refusal, RefusalReason, StepResult
from molt.learn.routes import Routes
from molt.learn.rows import MicroBatch, Row, check_lineage, digest_of, micro_batches, row_digest
from molt.learn.step import Columns, Step, WholeBatch, empty_gate
from molt.learn.weights import sent_digest

FrozenColumns = Sequence[np.ndarray]
"""Log-probs of a frozen model that stands apart: one float32 array for each micro-batch of the rank."""


class PolicyRank:
    """The work of one rank. It holds the policy, and what the algorithm needs beside it."""

    def __init__(self, config: Config, policy: Policy, journal: Journal, *, rank: int, beside: Beside | None = None) -> None:
        self.config = config
        self.policy = policy
        self.journal = journal
        self.group_size = config.fsdp.group_size
        self.rank = rank // self.group_size
        """The data shard: which part of a plan is read here."""
        self.is_first = rank % self.group_size == 0
        """Whether it writes for its data shard."""
        self.beside = beside or Beside()
        self.kl_coef = config.algo.kl.coef
        """In force; the adaptive controller moves it after each step."""
        self.routes: Routes | None = Routes.install(policy.scorer.lm) if config.train.routing_replay else None
        policy.scorer.routes = self.routes
        self._outgoing = Outgoing()

    def train(
        self, plan: StepPlan, recorded: RecordedStep | None = None, frozen: FrozenColumns | None = None, *, waits_for_log: bool = True
    ) -> StepResult:
        """One step. Every rank returns the same result; a refused step changes neither weights nor optimizer.

        recorded: what the log says of the step, in replay; a difference raises ReplayMismatchError. frozen: log-probs of the
        reference or teacher, where it stands apart. waits_for_log: whether scores and gate decisions are in the log on return;
        without it they are held back until release(), settle() says when they are there, and the step counts only then.
        """
        self.settle()
        begun = time.monotonic()
        rows, refusal, log_s = self._read(plan)
        if refusal is not None:
            return tally.refused(plan, refusal, train_s=time.monotonic() - begun, log_s=log_s)
        step = self._step(plan, rows, frozen)
        try:
            step.whole = self._whole_batch(step)
        except NonFiniteError as error:  # the same on every rank: the inputs are
            return tally.refused(plan, _non_finite(error), train_s=time.monotonic() - begun, log_s=log_s)
        row_digests = self._outgoing.pool.submit(self._row_digests, step)
        refusal = self._pass(step)
        total = tally.total(exchange.gather(step.sums, self.group_size))
        if refusal is None and total.n_kept == 0:
            refusal = Refusal(
                reason=RefusalReason.NOTHING_KEPT, error=f"no trainable token of {plan.n_sampled} sampled is left after the gate"
            )
        digests = self._digests(step, row_digests.result())
        self._outgoing.hold(self._write(step, refusal))
        if waits_for_log:
            self.release()
        update = None
        if refusal is None:
            update, refusal = self._update(step)
        else:
            self._forget()
        if refusal is None:
            update = self._more_epochs(step, update)
        weights_digest = self._weights_digest(plan) if refusal is None else None
        if waits_for_log:
            waiting = time.monotonic()
            self.settle()
            log_s += time.monotonic() - waiting
        own = (tally.kept(step.batches, step.columns.gates), tally.peak_memory(self.policy.device))
        of_ranks = exchange.gather(own)
        result = tally.result(
            plan,
            total,
            update=update,
            refusal=refusal,
            digests=digests,
            weights_digest=weights_digest,
            metrics=step.known.metrics | {"kl_coef": self.kl_coef} | tally.fullest([peak for _, peak in of_ranks]),
            uses=tally.uses(plan, [kept for kept, _ in of_ranks[:: self.group_size]]),
            train_s=time.monotonic() - begun,
            log_s=log_s,
        )
        self.journal.compare_step(plan, result, recorded)
        self._steer(plan, total, refusal)
        return result

    def release(self) -> None:
        """Begin to write scores and gate decisions of the newest step: its plan is in the log."""
        self._outgoing.release()

    def settle(self) -> None:
        """Return once everything that was written about the newest step is in the log; the error that kept it out is raised here."""
        self._outgoing.settle()

    @property
    def is_corrected(self) -> bool:
        """Whether a gate compares the trainer's log-probs with the engine's."""
        return self.config.algo.advantage.is_correction_level != "off"

    def read(self, segment_ids: list[str]) -> list[Row]:
        """Rows of the log in the order asked."""
        return self.journal.read(segment_ids)

    def _read(self, plan: StepPlan) -> tuple[dict[int, Row], Refusal | None, float]:
        """Own rows by place, or the refusal that all ranks agree on; seconds in the log."""
        begun = time.monotonic()
        places = exchange.places_of(plan, self.rank)
        rows = dict(zip(places, self.read([plan.segments[p].segment_id for p in places]), strict=True))
        log_s = time.monotonic() - begun
        found: Refusal | None = None
        try:
            for place, row in rows.items():
                check_lineage(plan.segments[place], row, is_corrected=self.is_corrected, vocab_size=vocab_size(self.policy.scorer))
                if self.routes is not None and row.routes is not None:
                    self.routes.check(row.routes, f"segment {row.segment_id}")
                if row.images is not None:
                    self.policy.scorer.check_images(row.images, f"segment {row.segment_id}")
        except LineageError as error:
            found = Refusal(reason=RefusalReason.LINEAGE, error=str(error))
        if self.routes is not None and not any(exchange.gather(any(row.routes is not None for row in rows.values()))):
            missing = "train.routing_replay=true and no segment of the batch has routed experts"
            found = found or Refusal(reason=RefusalReason.LINEAGE, error=missing)
        return rows, exchange.first_refusal(found), log_s

    def _step(self, plan: StepPlan, rows: dict[int, Row], frozen: FrozenColumns | None) -> Step:
        """Pack the rows, and score first what has to be known before the update."""
        batches = micro_batches(plan, self.rank, rows)
        columns = Columns()
        if self._scores_first():
            columns.logprobs = [self._score(batch) for batch in batches]
        if needs_frozen(self.config):
            found = [torch.from_numpy(column) for column in frozen] if frozen is not None else self._frozen_scores(batches)
            columns.reference = found if self.config.algo.kl.coef > 0 else []
            columns.teacher = found if is_distilled(self.config) else []
        if self.beside.critic is not None:
            columns.values = self.beside.critic.values(batches)
        kl = self.config.algo.kl.model_copy(update={"coef": self.kl_coef})
        return Step(
            plan=plan,
            algo=self.config.algo.model_copy(update={"kl": kl}),
            rows=rows,
            batches=batches,
            columns=columns,
            is_actor_frozen=needs_critic(self.config) and plan.step < self.config.critic.warmup_steps,
        )

    def _scores_first(self) -> bool:
        """Whether something needs the log-probs of the whole batch before the update."""
        needs = get_estimator(self.config.algo.advantage.estimator).needs
        return self.config.train.epochs_per_batch > 1 or bool({"logprobs", "teacher_logprobs"} & needs) or self._has_kl_reward()

    def _has_kl_reward(self) -> bool:
        return self.config.algo.kl.coef > 0 and self.config.algo.kl.use == "reward"

    def _score(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs without a graph. # (N,)"""
        logprobs, _ = self.policy.score(batch.packed)
        return logprobs[:0].cpu() if batch.is_dummy else logprobs.cpu()

    def _frozen_scores(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        assert self.beside.frozen is not None, "a frozen model is needed and neither beside the policy nor apart"
        return self.beside.frozen.score(batches)

    def _whole_batch(self, step: Step) -> WholeBatch:
        """Advantages and loss scale of the whole batch, alike on every rank."""
        config, columns = self.config, step.columns
        is_trainable_T = self._gather(step, [batch.is_trainable_N for batch in step.batches]) > 0
        batch = RaggedBatch.from_rows(step.plan.segments, is_trainable_T=is_trainable_T)
        shaped = shape_rewards(batch, step.algo, max_len=config.data.max_len)
        logprobs_T = self._gather(step, columns.logprobs) if columns.logprobs else None
        kl_T = None
        if self._has_kl_reward() and logprobs_T is not None:
            kl_T = kl_estimate(config.algo.kl.estimator, logprobs_T, self._gather(step, columns.reference))
        advantages = compute_advantages(
            config.algo.advantage.estimator,
            shaped.batch,
            step.algo,
            kl_T=kl_T,
            values_T=self._gather(step, columns.values) if columns.values else None,
            logprobs_T=logprobs_T,
            teacher_logprobs_T=self._gather(step, columns.teacher) if columns.teacher else None,
        )
        metrics = {f"shaped_{name}" if name == "reward_mean" else name: value for name, value in advantages.metrics.items()}
        return WholeBatch(
            advantages=advantages,
            scale_T=token_scale(config.algo.loss.aggregation, batch),
            offsets=exchange.token_offsets(step.plan),
            metrics=metrics | {f"reward_{name}": value for name, value in shaped.metrics.items()},
        )

    def _gather(self, step: Step, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A column over T from each rank's micro-batches."""
        own = torch.cat([part.float() for part in parts]) if parts else torch.zeros(0)
        return exchange.gather_column(step.plan, self.rank, own, device=self.policy.device, group_size=self.group_size)

    def _pass(self, step: Step) -> Refusal | None:
        """Forward, gate, loss and backward of every micro-batch, critic included; the refusal that all ranks agree on."""
        inputs = [batch.packed.to(self.policy.device) for batch in step.batches]
        done: list[tuple[torch.Tensor, Refusal | None]] = []
        for number, batch in enumerate(step.batches):
            self.policy.begin(is_last=number == len(step.batches) - 1)
            with torch.set_grad_enabled(not step.is_actor_frozen):
                logprobs, entropy = self.policy(inputs[number], wants_entropy=True)
                if len(step.columns.logprobs) == number:
                    step.columns.logprobs.append(logprobs.detach().cpu()[: 0 if batch.is_dummy else None])
                loss, refusal = logprobs.sum() * 0.0, None
                if batch.is_dummy:
                    step.columns.gates.append(empty_gate(step, number))
                else:
                    loss, refusal = self._loss_or_refusal(step, number, logprobs, entropy)
            if not step.is_actor_frozen:
                loss.backward()
            done.append((loss.detach(), refusal))
        if step.is_actor_frozen:
            self.policy.reshard()  # no backward pass gave back what the forward passes gathered
        if self.beside.critic is not None:
            self.beside.critic.accumulate(step)
        # Numbers are fetched now: each fetch waits for all that a GPU was given, so none stands between two micro-batches.
        found = self._take_in(step, done)
        if self.routes is not None:
            step.sums.routes = exchange.of_slices(self.routes.take_counts(), self.config.fsdp)
            misrouted = self.routes.misrouted(step.sums.routes)
            if misrouted is not None:
                found = found or Refusal(reason=RefusalReason.LINEAGE, error=f"rank {self.rank}: {misrouted}")
        return exchange.first_refusal(found)

    def _take_in(self, step: Step, done: Sequence[tuple[torch.Tensor, Refusal | None]]) -> Refusal | None:
        """Add up what the micro-batches noted; the first refusal, of a loss that is not finite too."""
        step.sums.add_noted()
        found: Refusal | None = None
        for number, (loss, refusal) in enumerate(done):
            value = float(loss)
            step.sums.losses.append(value)
            if refusal is None and not math.isfinite(value):
                refusal = Refusal(reason=RefusalReason.NON_FINITE, error=f"{self._where(step, number)}: loss {value}")
            found = found or refusal
        return found

    def _where(self, step: Step, number: int) -> str:
        """A micro-batch in words."""
        ids = ", ".join(step.plan.segments[p].segment_id for p in step.batches[number].places)
        return f"rank {self.rank}, micro-batch {number} ({ids})"

    def _loss_or_refusal(
        self, step: Step, number: int, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, Refusal | None]:
        """Loss of one micro-batch; what is wrong with it becomes a refusal, so that the rank stays in step with the others."""
        try:
            return self._loss(step, number, logprobs, entropy), None
        except (LineageError, NonFiniteError) as error:
            reason = RefusalReason.LINEAGE if isinstance(error, LineageError) else RefusalReason.NON_FINITE
            step.columns.gates.append(empty_gate(step, number))
            return logprobs.sum() * 0.0, Refusal(reason=reason, error=f"{self._where(step, number)}: {error}")

    def _loss(self, step: Step, number: int, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """Loss of one micro-batch with its graph; gate and sums are noted. Raises LineageError or NonFiniteError."""
        algo, batch, device = step.algo, step.batches[number], logprobs.device
        old_N, row_N = step.columns.logprobs[number], batch.packed.row_N
        tally.check_finite(step.plan, batch, old_N)
        gate = importance_gate(
            old_N,
            batch.behaviour_N,
            row_N,
            algo,
            num_segments=len(batch.places),
            is_trainable_T=batch.is_trainable_N,
            version_T=batch.version_N,
            trainer_version=step.plan.policy_version,
        )
        scale_N = step.known.scale_of(batch).to(device)
        weights_N = gate.weights_T.to(device)
        advantages_N = step.known.advantages_of(batch).to(device)
        output = policy_loss(algo.loss.name, logprobs, old_N.to(device), advantages_N, weights_N, scale_N, algo, segment_T=row_N.to(device))
        loss = output.loss
        if algo.loss.entropy_coef != 0:
            loss = loss + entropy_loss(entropy, scale_N, algo.loss.entropy_coef)
        if step.columns.reference:
            reference_N = step.columns.reference[number]
            step.sums.reference_kl += float(kl_estimate(algo.kl.estimator, old_N, reference_N)[batch.is_trainable_N].double().sum())
            if algo.kl.use == "loss":
                loss = loss + algo.kl.coef * kl_loss(algo.kl.estimator, logprobs, reference_N.to(device), scale_N, weights_N)
        step.columns.gates.append(gate)
        step.sums.note(gate, entropy.detach(), batch.is_trainable_N, output.metrics)
        return loss

    def _update(self, step: Step) -> tuple[Update | None, Refusal | None]:
        """One update of the actor and of the critic, or of neither. Norms are over all ranks, so all decide alike."""
        critic = self.beside.critic
        try:
            critic_norm = critic.measure() if critic is not None else None
            update = None if step.is_actor_frozen else self.policy.update()
        except NonFiniteError as error:
            self._forget()
            return None, exchange.first_refusal(_non_finite(error))
        if critic is not None and critic_norm is not None:
            done = critic.apply(critic_norm)
            step.known.metrics.update({"critic_grad_norm": done.grad_norm, "critic_learning_rate": done.learning_rate})
        if step.is_actor_frozen:
            step.known.metrics["is_actor_frozen"] = 1.0
            update = Update(grad_norm=0.0, learning_rate=0.0)
        return update, None

    def _more_epochs(self, step: Step, update: Update | None) -> Update | None:
        """Further passes over the same batch against the log-probs of its start. A refused one ends them; what was learned stays."""
        for epoch in range(1, self.config.train.epochs_per_batch):
            columns = Columns(logprobs=step.columns.logprobs, reference=step.columns.reference, values=step.columns.values)
            again = Step(
                plan=step.plan,
                algo=step.algo,
                rows=step.rows,
                batches=step.batches,
                columns=columns,
                whole=step.whole,
                is_actor_frozen=step.is_actor_frozen,
            )
            refusal = self._pass(again)
            if refusal is None:
                latest, refusal = self._update(again)
            if refusal is not None:
                self._forget()
                step.known.metrics["num_refused_epochs"] = float(self.config.train.epochs_per_batch - epoch)
                return update
            update = latest
        return update

    def _forget(self) -> None:
        """Drop the gradients of this step."""
        self.policy.forget_gradient()
        if self.beside.critic is not None:
            self.beside.critic.policy.forget_gradient()

    def _steer(self, plan: StepPlan, total: tally.Sums, refusal: Refusal | None) -> None:
        """Move the coefficient of the divergence towards its target."""
        if refusal is None and self.config.algo.kl.target is not None and total.n_trainable:
            measured = total.reference_kl / total.n_trainable
            kl = self.config.algo.kl
            self.kl_coef = next_coefficient(self.kl_coef, measured, target=kl.target, horizon=kl.horizon, n_steps=plan.num_rollouts)

    def _row_digests(self, step: Step) -> dict[int, str]:
        """Digest of each own row with its advantages, by place."""
        advantages, offsets = step.known.advantages.advantages_T.numpy(), step.known.offsets
        return {p: row_digest(row, advantages[offsets[p] : offsets[p + 1]]) for p, row in step.rows.items()}

    def _digests(self, step: Step, own: dict[int, str]) -> tuple[str, str]:
        """Batch digest and loss digest over all ranks. own: digests of this rank's rows."""
        facts: list[tuple[dict[int, str], list[float]]] = exchange.gather((own, step.sums.losses), self.group_size)
        by_place = {p: digest for found, _ in facts for p, digest in found.items()}
        losses = [np.float32(loss).tobytes().hex() for _, rank_losses in facts for loss in rank_losses]
        return digest_of([by_place[p] for p in range(len(step.plan.segments)) if p in by_place]), digest_of(losses)

    def _write(self, step: Step, refusal: Refusal | None) -> Future[Write] | None:
        """Encode scores and gates (or compare them with the log) while the update runs; the first rank of each data shard does."""
        if not self.is_first or (refusal is not None and refusal.reason is RefusalReason.LINEAGE):
            return None
        return self._outgoing.pool.submit(self.journal.scores, step, self.rank)

    def _weights_digest(self, plan: StepPlan) -> str | None:
        """Digest of the weights after the step, where it is due."""
        every = self.config.train.weights_digest_interval
        return sent_digest(self.policy) if every and (plan.step + 1) % every == 0 else None


def _non_finite(error: NonFiniteError) -> Refusal:
    return Refusal(reason=RefusalReason.NON_FINITE, error=str(error))
