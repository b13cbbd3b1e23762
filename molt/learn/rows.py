"""What one rank reads of a step: its own token columns from the log, checked against the plan, packed by micro-batch.

Axes: L tokens of a micro-batch, N sampled tokens in it, S segments of the whole plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from molt.admission.plan import SegmentRow, StepPlan
from molt.errors import LineageError
from molt.learn.packing import Packed, RowImages, dummy, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One segment with its token columns, all of length n_tokens."""

    segment_id: str
    token_ids: np.ndarray
    is_sampled: np.ndarray
    is_trainable: np.ndarray
    behaviour_logprobs: np.ndarray
    """float32; NaN where unknown."""
    policy_versions: np.ndarray
    """int32; -1 where not sampled."""
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    logprobs_mode: str = "processed"
    routes: np.ndarray | None = None
    """(n_tokens, M, K) int8 or int16: routed experts by absolute position, -1 where unknown; None when none were captured."""
    images: RowImages | None = None

    def sampled(self, column: np.ndarray) -> np.ndarray:
        """A column at the sampled tokens only."""
        return column[self.is_sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch of one rank. Empty plans give a dummy row without sampled tokens in the batch."""

    places: tuple[int, ...]
    """In plan.segments."""
    packed: Packed
    behaviour_N: torch.Tensor
    """float32, nats."""
    version_N: torch.Tensor
    """int64."""
    is_trainable_N: torch.Tensor

    @property
    def is_dummy(self) -> bool:
        """Nothing to learn here; the forward pass is made for the other ranks."""
        return not self.places


def check_lineage(planned: SegmentRow, row: Row, *, is_corrected: bool, vocab_size: int) -> None:
    """Refuse a row that differs from its plan or whose trainable tokens lack what training needs. LineageError names the token."""
    if len(row.token_ids) != planned.n_tokens or int(row.is_sampled.sum()) != planned.n_sampled:
        raise LineageError(
            f"segment {row.segment_id}: {len(row.token_ids)} tokens, {int(row.is_sampled.sum())} sampled; "
            f"the plan says {planned.n_tokens} and {planned.n_sampled}"
        )
    _refuse_first(row, (row.token_ids < 0) | (row.token_ids >= vocab_size), f"the model knows ids below {vocab_size}; another one wrote it")
    if len(row.is_sampled) and row.is_sampled[0]:
        raise LineageError(f"segment {row.segment_id}: token 0 counts as sampled, but nothing precedes it")
    _refuse_first(row, row.is_trainable & ~row.is_sampled, "it is trainable but the policy did not sample it")
    if row.logprobs_mode != "processed":
        if row.is_trainable.any() and is_corrected:
            raise LineageError(f"segment {row.segment_id}: logprobs_mode={row.logprobs_mode}, the gate needs processed log-probs")
        return
    _refuse_first(row, row.is_trainable & ~np.isfinite(row.behaviour_logprobs), "its behaviour log-prob is not finite or unknown")
    _refuse_first(row, row.is_trainable & (row.policy_versions < 0), "its policy version is unknown")
    if is_corrected and row.is_trainable.any() and (row.top_p < 1 or row.top_k > 0):
        raise LineageError(
            f"segment {row.segment_id}: sampled with top_p={row.top_p:g}, top_k={row.top_k}; the ratio would contain the kept mass, "
            "so it cannot be corrected; sample with top_p=1 and top_k=0 or set algo.advantage.is_correction_level to off"
        )


def _refuse_first(row: Row, is_bad: np.ndarray, why: str) -> None:
    """LineageError for the first bad token."""
    if is_bad.any():
        place = int(np.flatnonzero(is_bad)[0])
        raise LineageError(f"segment {row.segment_id}, token {place} (id {int(row.token_ids[place])}): {why}")


def micro_batches(plan: StepPlan, rank: int, rows: dict[int, Row]) -> list[MicroBatch]:
    """The micro-batches of a rank. rows: place in plan.segments to its row."""
    return [_micro_batch(places, [rows[place] for place in places]) for places in plan.micro_batches[rank]]


def _micro_batch(places: tuple[int, ...], rows: Sequence[Row]) -> MicroBatch:
    """Pack one micro-batch; a dummy has a sampled token in its packed row and none in its columns."""
    packed = dummy()
    if rows:
        packed = pack(
            [r.token_ids for r in rows],
            [r.is_sampled for r in rows],
            [r.temperature for r in rows],
            [r.routes for r in rows],
            [r.images for r in rows],
        )
    return MicroBatch(
        places=places,
        packed=packed,
        behaviour_N=_column([r.sampled(r.behaviour_logprobs) for r in rows], np.float32),
        version_N=_column([r.sampled(r.policy_versions) for r in rows], np.int64),
        is_trainable_N=_column([r.sampled(r.is_trainable) for r in rows], np.bool_),
    )


def _column(parts: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
    """One tensor from the parts of the rows."""
    return torch.from_numpy(np.concatenate(parts).astype(dtype)) if len(parts) else torch.zeros(0, dtype=_TORCH[dtype])


_TORCH = {np.float32: torch.float32, np.int64: torch.int64, np.bool_: torch.bool}


def row_digest(row: Row, advantages: np.ndarray) -> str:
    """blake2b-128 hex over id, token ids, masks, advantages and names of images of one segment."""
    state = hashlib.blake2b(digest_size=16)
    state.update(f"{row.segment_id}|{len(row.token_ids)}|{len(advantages)}|".encode())
    state.update(np.ascontiguousarray(row.token_ids, np.int32).tobytes())
    state.update(np.packbits(row.is_sampled).tobytes() + np.packbits(row.is_trainable).tobytes())
    state.update(np.ascontiguousarray(advantages, np.float32).tobytes())
    if row.images is not None:
        state.update("|".join(name for names in row.images.digests for name in names).encode())
    return state.hexdigest()


def digest_of(parts: Sequence[str]) -> str:
    """blake2b-128 hex over lines, in order."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
