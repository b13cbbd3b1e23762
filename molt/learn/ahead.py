"""Rows of a planned step, read from the log before the step begins.

plan made --expect--> a thread of its own reads and checks digests   (meanwhile the plan is being written down)
step      --take----> rows that are there, or waits for them; what nobody announced is read now
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from molt.learn.rows import Row

Read = Callable[[Sequence[str]], list[Row]]


class RowsAhead:
    """Holds the rows of the newest announcement and no others, so it is never larger than one step of a rank."""

    def __init__(self, read: Read) -> None:
        """read: rows in the order asked; it is called in one thread only."""
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._coming: dict[str, tuple[Future[list[Row]], int]] = {}
        """Segment to the reading that brings it, and its place there."""

    def expect(self, segment_ids: Sequence[str]) -> None:
        """Begin to read those that are not coming yet; forget all others."""
        wanted = set(segment_ids)
        self._coming = {name: found for name, found in self._coming.items() if name in wanted}
        fresh = [name for name in segment_ids if name not in self._coming]
        if fresh:
            reading = self._thread.submit(self._read, fresh)
            self._coming |= {name: (reading, place) for place, name in enumerate(fresh)}

    def take(self, segment_ids: Sequence[str]) -> list[Row]:
        """Rows in the order asked; the error of a reading that failed is raised here."""
        self.expect(segment_ids)
        coming, self._coming = self._coming, {}
        return [coming[name][0].result()[coming[name][1]] for name in segment_ids]
