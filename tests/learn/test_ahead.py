"""Rows read ahead: announced ones are not read twice, others are forgotten, and a failed reading fails the step that needs it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from molt.errors import CorruptLogError
from molt.learn.ahead import RowsAhead
from molt.learn.rows import Row
from tests.learn.tiny import make_rows


class Shelf:
    """Rows by name, and what was read of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {row.segment_id: row for row in rows}
        self.readings: list[list[str]] = []

    def read(self, segment_ids: Sequence[str]) -> list[Row]:
        self.readings.append(list(segment_ids))
        if any(name not in self.rows for name in segment_ids):
            raise CorruptLogError("a row fails its digest")
        return [self.rows[name] for name in segment_ids]


def test_announced_rows_are_read_once_and_the_rest_when_the_step_asks():
    shelf = Shelf(make_rows(4))
    a, b, c, _ = shelf.rows
    ahead = RowsAhead(shelf.read)
    ahead.expect([a, b])
    assert [row.segment_id for row in ahead.take([c, b, a])] == [c, b, a]
    assert shelf.readings == [[a, b], [c]]


def test_what_a_newer_announcement_leaves_out_is_forgotten():
    shelf = Shelf(make_rows(4))
    a, b, c, _ = shelf.rows
    ahead = RowsAhead(shelf.read)
    ahead.expect([a, b])
    ahead.expect([b, c])
    ahead.take([b, c])
    ahead.take([a])  # taken rows are not held either, so this is its second reading
    assert shelf.readings == [[a, b], [c], [a]]


def test_a_failed_reading_is_raised_in_the_step_that_needs_it():
    ahead = RowsAhead(Shelf(make_rows(2)).read)
    ahead.expect(["gone"])
    with pytest.raises(CorruptLogError, match="fails its digest"):
        ahead.take(["gone"])
