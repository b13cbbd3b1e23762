"""Reading whole blobs of the payloads table, several at a time: Lance lets go of the interpreter while it reads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import lance

NUM_THREADS = 4


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="molt-blobs")


def read_blobs(dataset: lance.LanceDataset, row_ids: Sequence[int]) -> list[bytes]:
    """Bytes of the blobs at those row ids, in that order."""
    if not row_ids:
        return []
    files = dataset.take_blobs("data", ids=list(row_ids), buffer_size=0)
    return list(_pool().map(lambda file: b"" if file is None else bytes(file.readall()), files))
