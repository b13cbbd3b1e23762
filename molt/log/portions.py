"""How many rows of a table are read at a time: as many as hold a bounded number of bytes, however long the longest of them is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lance
import pyarrow.compute as pc

WEIGHT = {"payloads": ("size_bytes", 1), "segments": ("n_tokens", 8), "scores": ("n_sampled", 24)}
"""By table: the column that says how heavy a row is, and bytes for each. Rows of other tables are light."""
PORTION_BYTES = 32 << 20
"""Content of the rows of one batch."""
MOST_ROWS = 1024


def reading(dataset: lance.LanceDataset, table: str, fragments: Sequence[lance.LanceFragment] | None = None) -> dict[str, Any]:
    """Options of a scanner that reads whole rows of a table, or of some fragments of it, portion by portion."""
    options: dict[str, Any] = {"blob_handling": "all_binary"} if table == "payloads" else {}
    rows = MOST_ROWS
    if table in WEIGHT:
        column, width = WEIGHT[table]
        heaviest = pc.max(dataset.scanner(columns=[column], fragments=fragments).to_table()[column]).as_py() or 0
        rows = min(rows, max(1, PORTION_BYTES // max(1, heaviest * width)))
    return options | {"batch_size": rows}
