"""A rank's side of the log over a real log: rows as written, routed experts by digest, scores that replay compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from molt.errors import LogError, ReplayMismatchError
from molt.learn.journal import LogJournal, read_rows
from molt.learn.rank import PolicyRank
from molt.learn.result import FIGURES, RecordedStep
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Payload
from molt.log.writer import LogWriter
from tests.learn.tiny import make_config, make_plan, make_rank, make_rows, to_segments


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    opened = LogWriter.open(tmp_path / "run", run="run", attempt=1, store="durable")
    yield opened
    opened.close()


def test_rows_come_back_as_written_in_the_order_asked(writer: LogWriter, tmp_path: Path) -> None:
    rows = make_rows(4)
    Producer(writer, "test").append_sync(segments=to_segments(rows))
    found = read_rows(LogReader.open(tmp_path / "run"), [rows[2].segment_id, rows[0].segment_id])
    for row, back in zip((rows[2], rows[0]), found, strict=True):
        assert back.segment_id == row.segment_id
        for name in ("token_ids", "is_sampled", "is_trainable", "policy_versions"):
            assert np.array_equal(getattr(row, name), getattr(back, name)), name
        assert np.array_equal(row.behaviour_logprobs, back.behaviour_logprobs, equal_nan=True)  # unknown is null, never 0.0


def test_routed_experts_are_read_where_they_are_wanted_and_missing_ones_are_an_error(writer: LogWriter, tmp_path: Path) -> None:
    rows = make_rows(3)
    routes = np.arange(len(rows[0].token_ids) * 4, dtype=np.int16).reshape(-1, 2, 2)
    payload = Payload.of_array("routing", routes)
    segments = to_segments(rows)
    segments[0] = replace(segments[0], routing_digest=payload.payload_digest)
    segments[2] = replace(segments[2], routing_digest="f" * 32)  # its payload never came
    Producer(writer, "test").append_sync(segments=segments, payloads=[payload])
    reader = LogReader.open(tmp_path / "run")
    first, second = read_rows(reader, [rows[0].segment_id, rows[1].segment_id], wants_routes=True)
    assert first.routes is not None and np.array_equal(first.routes, routes) and second.routes is None
    assert read_rows(reader, [rows[0].segment_id])[0].routes is None
    with pytest.raises(LogError, match=r"f{32}: no such payload in the log"):
        read_rows(reader, [rows[2].segment_id], wants_routes=True)


def test_recorded_step_replays_and_the_first_differing_token_is_named(writer: LogWriter, model: Path, tmp_path: Path) -> None:
    rows, config = make_rows(4), make_config(model)
    Producer(writer, "test").append_sync(segments=to_segments(rows))

    def rank(producer: Producer | None) -> PolicyRank:
        policy = make_rank(config, rows).policy
        return PolicyRank(config, policy, LogJournal(config, LogReader.open(tmp_path / "run"), producer), rank=0)

    live = rank(Producer(writer, "rank")).train(make_plan(rows))
    recorded = RecordedStep(batch_digest=live.batch_digest, loss_digest=live.loss_digest, weights_digest=live.weights_digest)
    assert rank(None).train(make_plan(rows), recorded).weights_digest == live.weights_digest
    with pytest.raises(ReplayMismatchError, match=r"step 0: weights digest is .*, recorded other"):
        rank(None).train(make_plan(rows), replace(recorded, weights_digest="other"))
    figures = {name: getattr(live, name) for name in FIGURES}
    assert rank(None).train(make_plan(rows), replace(recorded, figures=figures)).loss == live.loss
    for name in FIGURES:
        with pytest.raises(ReplayMismatchError, match=rf"step 0: {name} is .*, recorded 7\.5"):
            rank(None).train(make_plan(rows), replace(recorded, figures=figures | {name: 7.5}))
    swapped = make_plan(rows, rewards=[0.0, 1.0, 1.0, 0.0])  # group 0 is paid the other way round
    with pytest.raises(ReplayMismatchError, match=r"step 0, segment e0-p0/\d/1/0, sampled token 0: advantages is .*, recorded"):
        rank(None).train(swapped)
    with pytest.raises(ReplayMismatchError, match="the log holds no score of it"):
        rank(None).train(make_plan(rows, step=1))
