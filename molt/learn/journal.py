"""A rank's side of the log: it reads its rows, and writes scores and gate decisions - or, in replay, compares them.

record   read (ahead, where the step was announced) -> train -> append (acknowledged before the step counts)
replay   read -> train -> compare with what is there, bit for bit; the first difference ends it
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from molt.admission.plan import StepPlan
from molt.algo.correction import Gate
from molt.config import Config
from molt.errors import LineageError, ReplayMismatchError
from molt.learn.ahead import RowsAhead
from molt.learn.packing import RowImages
from molt.learn.result import RecordedStep, StepResult
from molt.learn.rows import MicroBatch, Row
from molt.learn.step import Step
from molt.log.batch import SOURCES, SegmentBatch
from molt.log.rows import Event, Score, TokenSource, event

if TYPE_CHECKING:
    from molt.log.cut import Cut
    from molt.log.message import Message
    from molt.log.producer import Producer
    from molt.log.reader import LogReader


Write = Callable[[], None]
"""Writes what was prepared; returns when it is durable."""

IMAGE = SOURCES.index(TokenSource.IMAGE)
"""Code of the source of image tokens."""
COMPARED = ("trainer_logprobs", "reference_logprobs", "teacher_logprobs", "values", "advantages", "gate_weights")
"""Score columns that replay compares."""


class Outgoing:
    """What the newest step writes: encoded, held back until its plan is in the log, then on its way. settle may be called by any thread."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._held: Future[Write] | None = None
        self._writing: Future[None] | None = None
        self._lock = threading.Lock()

    def hold(self, encoding: Future[Write] | None) -> None:
        """Keep what is being encoded; None where nothing is to be written."""
        self._held = encoding

    def release(self) -> None:
        """Begin to write it."""
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                self._writing = self.pool.submit(lambda: held.result()())

    def settle(self) -> None:
        """Return once it is in the log; the error that kept it out is raised here."""
        self.release()
        with self._lock:
            writing = self._writing  # it stays, so that everyone who asks waits and hears the error
        if writing is not None:
            writing.result()


class Journal(Protocol):
    """What a rank needs of the log."""

    def read(self, segment_ids: Sequence[str]) -> list[Row]:
        """Rows in the order asked, each checked against its digest."""
        ...

    def scores(self, step: Step, rank: int) -> Write:
        """Encode (or compare) what one rank computed. What it returns writes it down, and returns when it is durable."""
        ...

    def compare_step(self, plan: StepPlan, result: StepResult, recorded: RecordedStep | None) -> None:
        """In replay: ReplayMismatchError where the step differs from the record."""
        ...


class LogJournal:
    """The journal over the trajectory log."""

    def __init__(self, config: Config, reader: LogReader, producer: Producer | None) -> None:
        """producer: None in replay, where nothing is written."""
        self.config = config
        self.reader = reader
        self.producer = producer
        self._ahead = RowsAhead(self._read)

    def expect(self, segment_ids: Sequence[str]) -> None:
        """Begin to read rows that a step will ask for soon."""
        self._ahead.expect(segment_ids)

    def read(self, segment_ids: Sequence[str]) -> list[Row]:
        """Rows in the order asked."""
        return self._ahead.take(segment_ids)

    def _read(self, segment_ids: Sequence[str]) -> list[Row]:
        return read_rows(self.reader, segment_ids, wants_routes=self.config.train.routing_replay)

    def scores(self, step: Step, rank: int) -> Write:
        """Encode scores and gate decisions of one rank; in replay, compare scores with those recorded."""
        made = [score for number in range(len(step.batches)) for score in _scores(step, number, rank)]
        if self.producer is None:
            self._compare(step.plan, made)
        elif made:
            batches = zip(step.batches, step.columns.gates, strict=True)
            events = [e for batch, gate in batches for e in self._gate_events(step.plan, batch, gate)]
            return partial(self._send, self.producer, self.producer.prepare(scores=made, events=events))
        return _nothing

    def _send(self, producer: Producer, message: Message) -> None:
        producer.send(message)

    def compare_step(self, plan: StepPlan, result: StepResult, recorded: RecordedStep | None) -> None:
        """Digests of batch, loss and weights, and the figures, against the record, where there is one."""
        if self.producer is not None or recorded is None:
            return
        pairs = {
            "batch digest (ids, masks, advantages)": (recorded.batch_digest, result.batch_digest),
            "loss digest": (recorded.loss_digest, result.loss_digest),
            "weights digest": (recorded.weights_digest or result.weights_digest, result.weights_digest),
        }
        for name, (then, now) in pairs.items():
            if then != now:
                raise ReplayMismatchError(f"step {plan.step}: {name} is {now}, recorded {then}")
        for name, figure in recorded.figures.items():
            if figure != getattr(result, name):
                raise ReplayMismatchError(f"step {plan.step}: {name} is {getattr(result, name)!r}, recorded {figure!r}")

    def _gate_events(self, plan: StepPlan, batch: MicroBatch, gate: Gate) -> list[Event]:
        """The gate's decision on each segment of one micro-batch."""
        settings = self.config.algo.advantage
        low, high = gate.band
        return [
            event(
                "gate_decided",
                step=plan.step,
                policy_version=plan.policy_version,
                group_id=plan.segments[place].group_id,
                rollout_id=plan.segments[place].rollout_id,
                segment_id=plan.segments[place].segment_id,
                level=settings.is_correction_level,
                mode=settings.is_correction_mode,
                low=low,
                high=high,
                n_tokens=int(gate.n_tokens_S[row]),
                n_kept=int(gate.n_kept_S[row]),
                ratio_mean=_number(gate.ratio_mean_S[row]),
                log_ratio_min=_number(gate.log_ratio_min_S[row]),
                log_ratio_max=_number(gate.log_ratio_max_S[row]),
            )
            for row, place in enumerate(batch.places)
        ]

    def _compare(self, plan: StepPlan, made: Sequence[Score]) -> None:
        """ReplayMismatchError at the first score that differs in any bit from the newest record of the step."""
        recorded = recorded_scores(self.reader, plan.step, [score.segment_id for score in made])
        for score in made:
            then = recorded.get(score.segment_id)
            if then is None:
                raise ReplayMismatchError(f"step {plan.step}, segment {score.segment_id}: the log holds no score of it")
            for column in COMPARED:
                _compare_column(plan.step, score.segment_id, column, then.get(column), getattr(score, column))


def _nothing() -> None:
    """Nothing is to be written."""


def read_rows(reader: LogReader, segment_ids: Sequence[str], *, wants_routes: bool = False) -> list[Row]:
    """Rows of the log in the order asked, digests checked; with their routed experts where those are wanted and were captured."""
    if not segment_ids:
        return []
    cut = reader.cut()
    batch = cut.segments(list(segment_ids))
    names = ("segment_id", "temperature", "top_p", "top_k", "logprobs_mode", "routing_digest")
    scalars = {name: batch.column(name).to_pylist() for name in names}
    routes = read_arrays(cut, [digest for digest in scalars["routing_digest"] if digest is not None]) if wants_routes else {}
    images = read_images(cut, batch)
    return [
        Row(
            segment_id=scalars["segment_id"][place],
            token_ids=batch.token_ids_T[low:high],
            is_sampled=batch.is_sampled_T[low:high],
            is_trainable=batch.is_trainable_T[low:high],
            behaviour_logprobs=batch.behaviour_logprobs_T[low:high],
            policy_versions=batch.policy_version_T[low:high],
            temperature=scalars["temperature"][place],
            top_p=scalars["top_p"][place],
            top_k=scalars["top_k"][place],
            logprobs_mode=scalars["logprobs_mode"][place],
            routes=routes.get(scalars["routing_digest"][place]),
            images=images[place],
        )
        for place, (low, high) in enumerate(pairwise(batch.offsets_S))
    ]


def read_images(cut: Cut, batch: SegmentBatch) -> list[RowImages | None]:
    """Images of each segment of a batch, their tensors read from the log; None for one without any."""
    if "media" not in batch.scalars.column_names:  # a log from before there were images
        return [None] * len(batch)
    media = [cell or () for cell in batch.column("media").to_pylist()]
    tensors = read_arrays(cut, [m["payload_digest"] for cell in media for m in cell if m["name"] != "image"])
    return [
        row_images(batch.source_T[low:high] == IMAGE, media[place], tensors) for place, (low, high) in enumerate(pairwise(batch.offsets_S))
    ]


def row_images(is_feature: np.ndarray, media: Sequence[Mapping[str, Any]], tensors: Mapping[str | None, np.ndarray]) -> RowImages | None:
    """Images of one row from its column `media`; None without any. LineageError when image tokens lie outside every image."""
    if not media and not is_feature.any():
        return None
    images = [list(group) for _, group in groupby(media, key=lambda medium: medium["position"])]
    counts = tuple(int(is_feature[image[0]["position"] :][: image[0]["len"]].sum()) for image in images)
    if sum(counts) != int(is_feature.sum()):
        raise LineageError(f"{int(is_feature.sum())} image tokens, {sum(counts)} of them inside the {len(images)} images of the segment")
    return RowImages(
        is_feature=is_feature,
        counts=counts,
        tensors=tuple({m["name"]: tensors[m["payload_digest"]] for m in image if m["name"] != "image"} for image in images),
        digests=tuple(tuple(medium["payload_digest"] for medium in image) for image in images),
    )


def read_arrays(cut: Cut, digests: Sequence[str]) -> dict[str | None, np.ndarray]:
    """Arrays of payloads by digest, each checked against its name: routed experts (tokens, M, K), processor tensors (tiles, ...)."""
    if not digests:
        return {}
    names = sorted(set(digests))
    return {name: payload.to_array() for name, payload in zip(names, cut.payloads(names), strict=True)}


def recorded_scores(reader: LogReader, step: int, segment_ids: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """Newest score columns of each segment at a step, float32 with NaN for null."""
    table = reader.cut().table("scores", columns=["lsn", "step", "segment_id", *COMPARED], where=f"step = {int(step)}")
    wanted = set(segment_ids)
    found: dict[str, dict[str, np.ndarray]] = {}
    for row in range(table.num_rows):
        segment_id = table["segment_id"][row].as_py()
        if segment_id in wanted:
            found[segment_id] = {
                name: table[name][row].values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
                for name in COMPARED
                if table[name][row].is_valid
            }
    return found


def _scores(step: Step, number: int, rank: int) -> list[Score]:
    """Score rows of one micro-batch."""
    plan, columns, batch = step.plan, step.columns, step.batches[number]
    advantages_N, weights_N = step.known.advantages_of(batch), columns.gates[number].weights_T
    scores, at = [], 0
    for place in batch.places:
        span = slice(at, at + plan.segments[place].n_sampled)
        scores.append(
            Score(
                step=plan.step,
                policy_version=plan.policy_version,
                segment_id=plan.segments[place].segment_id,
                rank=rank,
                trainer_logprobs=columns.logprobs[number][span].numpy(),
                reference_logprobs=columns.reference[number][span].numpy() if columns.reference else None,
                teacher_logprobs=columns.teacher[number][span].numpy() if columns.teacher else None,
                values=columns.values[number][span].numpy() if columns.values else None,
                advantages=advantages_N[span].numpy(),
                gate_weights=weights_N[span].numpy(),
            )
        )
        at = span.stop
    return scores


def _compare_column(step: int, segment_id: str, column: str, then: np.ndarray | None, now: np.ndarray | None) -> None:
    """ReplayMismatchError at the first token whose bits differ; null and NaN are one."""
    if then is None or now is None:
        if then is not now:
            raise ReplayMismatchError(
                f"step {step}, segment {segment_id}: {column} is {'absent' if now is None else 'there'}, not so in the record"
            )
        return
    if len(then) != len(now):
        raise ReplayMismatchError(f"step {step}, segment {segment_id}: {column} has {len(now)} tokens, recorded {len(then)}")
    differs = (then.view(np.int32) != now.view(np.int32)) & ~(np.isnan(then) & np.isnan(now))
    if differs.any():
        token = int(np.flatnonzero(differs)[0])
        raise ReplayMismatchError(
            f"step {step}, segment {segment_id}, sampled token {token}: {column} is {float(now[token])!r}, recorded {float(then[token])!r}"
        )


def _number(value: torch.Tensor) -> float | None:
    """A float, None for one that is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None
