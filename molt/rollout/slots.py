"""Key and value cache of the embedded engine: one slot per running sequence, each at its own length.

Layout per layer: (slots * (length + 1), kv heads, head dim). The last position of each slot takes what must not be kept
(padding, idle rows). Slots and length grow by doubling, so a small run stays small.
"""

from __future__ import annotations

import torch


class SlotCache:
    """Cache that a Hugging Face causal LM writes through `update`; `aim` says where the next forward pass writes and reads."""

    def __init__(self, num_layers: int, *, max_length: int, device: torch.device) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._device = device
        self._max_length = max_length
        self.num_slots = 0
        self.length = 0
        self._write_BQ = torch.empty(0)
        self._rows_B: torch.Tensor | None = None
        self._num_rows = 0
        self._longest = 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for so many slots of so many positions; what is stored stays."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        slots = max(self.num_slots, 1)
        while slots < num_slots:
            slots *= 2
        longer = max(self.length, 32)
        while longer < length:
            longer *= 2
        longer = min(longer, self._max_length) if length <= self._max_length else length
        for index, layer in enumerate(self._layers):
            if layer is not None:
                self._layers[index] = (self._grown(layer[0], slots, longer), self._grown(layer[1], slots, longer))
        self.num_slots, self.length = slots, longer

    def _grown(self, old: torch.Tensor, slots: int, length: int) -> torch.Tensor:
        _, heads, width = old.shape
        new = old.new_zeros(slots, length + 1, heads, width)
        new[: self.num_slots, : self.length] = old.view(self.num_slots, self.length + 1, heads, width)[:, : self.length]
        return new.view(-1, heads, width)

    def aim(self, slots_B: list[int], positions_BQ: torch.Tensor, is_kept_BQ: torch.Tensor, longest: int) -> None:
        """Set the next pass: row b is slot slots_B[b], its tokens go to positions_BQ unless not kept, and it reads `longest` entries."""
        first = torch.tensor(slots_B, device=self._device)[:, None] * (self.length + 1)
        self._write_BQ = (first + torch.where(is_kept_BQ, positions_BQ, self.length)).reshape(-1)
        self._num_rows = len(slots_B)
        is_leading = slots_B == list(range(len(slots_B)))
        self._rows_B = None if is_leading else torch.tensor(slots_B, device=self._device)
        self._longest = longest

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, heads, Q, width) and return everything that the rows may attend to: (B, heads, longest, width)."""
        layer = self._layers[layer_idx]
        if layer is None:
            shape = (self.num_slots * (self.length + 1), keys.shape[1], keys.shape[3])
            layer = (keys.new_zeros(shape), values.new_zeros((*shape[:2], values.shape[3])))
            self._layers[layer_idx] = layer
        return self._store(layer[0], keys), self._store(layer[1], values)

    def _store(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        heads, width = stored.shape[1:]
        stored.index_copy_(0, self._write_BQ, new.transpose(1, 2).reshape(-1, heads, width))
        slots = stored.view(self.num_slots, self.length + 1, heads, width)
        rows = slots[: self._num_rows] if self._rows_B is None else slots[self._rows_B]
        return rows[:, : self._longest].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries in reach of the next pass."""
        return self._longest

    @property
    def is_compileable(self) -> bool:
        """Never: positions differ from row to row."""
        return False
