"""Rows of the log laid end to end in one packed input that no row can look out of.

Axes: L packed tokens of one micro-batch, R rows (segments) in it, N sampled tokens in it (row order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from molt.data.processor import PlacedImage, named_tensors
from molt.errors import LineageError
from molt.learn.routes import pack_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The images of one row."""

    is_feature: np.ndarray
    """bool for each token of the row: its embedding is a feature."""
    counts: tuple[int, ...]
    """Features of each image, in the order of their tokens."""
    tensors: tuple[dict[str, np.ndarray], ...]
    """What the processor made of each: (tiles, ...) by name."""
    digests: tuple[tuple[str, ...], ...]
    """Names of the payloads of each."""

    @classmethod
    def of(cls, placed: Sequence[PlacedImage], num_tokens: int) -> RowImages | None:
        """The images that stand in a row of that length; None for none."""
        if not placed:
            return None
        is_feature = np.zeros(num_tokens, bool)
        for item in placed:
            is_feature[item.position : item.end] = item.expansion.is_feature
        return cls(
            is_feature=is_feature,
            counts=tuple(int(item.expansion.is_feature.sum()) for item in placed),
            tensors=tuple(item.expansion.tensors() for item in placed),
            digests=tuple(tuple(part.payload_digest for part in item.expansion.parts) for item in placed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One micro-batch without padding. Attention stays inside a row; the shift by one happens inside a row."""

    input_ids: torch.Tensor
    """(1, L) int64."""
    position_ids: torch.Tensor
    """(1, L) int64: restarts at 0 in every row."""
    row_lengths: tuple[int, ...]
    """(R,): they sum to L."""
    index_N: torch.Tensor
    """(N,) int64: place in L whose output predicts the token."""
    target_N: torch.Tensor
    """(N,) int64: the sampled ids."""
    temperature_N: torch.Tensor
    """(N,) float32: softmax temperature that each was sampled at."""
    row_N: torch.Tensor
    """(N,) int64: row of each sampled token."""
    routes_LMK: torch.Tensor | None = None
    """(L, M, K) int16: experts that the engine chose, -1 where unknown; None without routing replay."""
    feature_F: torch.Tensor | None = None
    """(F,) int64: places in L that take features of images; None without images."""
    source_F: torch.Tensor | None = None
    """(F,) int64: which feature each takes, counted over the tiles of image_tensors."""
    image_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the processor made of the images, each image once, tiles after tiles: (tiles, ...) by name. They stay on the host."""
    n_padding: int = 0
    """Tokens at the end that nobody wrote: of a dummy, or of what fills up a slice."""

    def to(self, device: torch.device) -> Packed:
        """The same micro-batch on another device."""
        if device.type == "cpu":
            return self
        return Packed(
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            row_lengths=self.row_lengths,
            index_N=self.index_N.to(device, non_blocking=True),
            target_N=self.target_N.to(device, non_blocking=True),
            temperature_N=self.temperature_N.to(device, non_blocking=True),
            row_N=self.row_N.to(device, non_blocking=True),
            routes_LMK=None if self.routes_LMK is None else self.routes_LMK.to(device, non_blocking=True),
            feature_F=None if self.feature_F is None else self.feature_F.to(device, non_blocking=True),
            source_F=None if self.source_F is None else self.source_F.to(device, non_blocking=True),
            image_tensors=self.image_tensors,
            n_padding=self.n_padding,
        )


def pack(
    token_ids: Sequence[np.ndarray],
    is_sampled: Sequence[np.ndarray],
    temperatures: Sequence[float] | None = None,
    routes: Sequence[np.ndarray | None] | None = None,
    images: Sequence[RowImages | None] | None = None,
) -> Packed:
    """Lay rows end to end. Raises LineageError for a row whose first token counts as sampled: nothing predicts it."""
    lengths = tuple(len(ids) for ids in token_ids)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if lengths else np.zeros(0, np.int64)
    index, target, rows = [], [], []
    for row, (ids, mask) in enumerate(zip(token_ids, is_sampled, strict=True)):
        places = np.flatnonzero(mask)
        if len(places) and places[0] == 0:
            raise LineageError(f"row {row}: its first token is marked as sampled, but nothing precedes it; the row cannot be scored")
        index.append(starts[row] + places - 1)
        target.append(ids[places])
        rows.append(np.full(len(places), row, np.int64))
    row_N = _joined(rows, np.int64)
    tensors, feature_F, source_F = _lay_images(images or (), starts)
    scale = np.ones(len(lengths), np.float32) if temperatures is None else np.asarray(temperatures, np.float32)
    return Packed(
        input_ids=torch.from_numpy(_joined(token_ids, np.int64))[None],
        position_ids=torch.from_numpy(_joined([np.arange(n) for n in lengths], np.int64))[None],
        row_lengths=lengths,
        index_N=torch.from_numpy(_joined(index, np.int64)),
        target_N=torch.from_numpy(_joined(target, np.int64)),
        temperature_N=torch.from_numpy(scale[row_N]),
        row_N=torch.from_numpy(row_N),
        routes_LMK=None if routes is None else pack_routes(routes, lengths),
        feature_F=feature_F,
        source_F=source_F,
        image_tensors=tensors,
    )


def _lay_images(
    images: Sequence[RowImages | None], starts: np.ndarray
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
    """Tensors of all images, an image that several rows show once; where features go, and which ones. Nones without images."""
    seen: dict[tuple[str, ...], tuple[int, dict[str, np.ndarray]]] = {}
    num_features = 0
    features, sources = [], []
    for row, item in enumerate(images):
        if item is None:
            continue
        features.append(starts[row] + np.flatnonzero(item.is_feature))
        for count, tensors, digests in zip(item.counts, item.tensors, item.digests, strict=True):
            if digests not in seen:
                seen[digests] = (num_features, tensors)
                num_features += count
            sources.append(seen[digests][0] + np.arange(count))
    if not features:
        return {}, None, None
    joined = named_tensors(tensors for _, tensors in seen.values())
    whole = {name: torch.from_numpy(tensor) for name, tensor in joined.items()}
    return whole, torch.from_numpy(_joined(features, np.int64)), torch.from_numpy(_joined(sources, np.int64))


def dummy() -> Packed:
    """A row of two tokens for a rank that has nothing to do, so that it takes part in every collective."""
    return replace(pack([np.zeros(2, np.int32)], [np.array([False, True])]), n_padding=2)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """One array of that type, also for no parts."""
    return np.concatenate(parts).astype(dtype, copy=False) if len(parts) else np.zeros(0, dtype)
