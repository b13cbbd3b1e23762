"""Rows, their encoding, their digests, and the checks that the schema declares."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from molt.errors import DataError
from molt.log.digest import merkle_root, row_digests
from molt.log.message import Message
from molt.log.rows import Medium, Payload, Score, Segment, Span, TokenSource, event, to_arrow
from molt.schema import arrow_schema, event_kinds, reference, tables, validate
from tests.log.build import make_image_segment, make_message, make_segment


def encoded(*segments: Segment) -> pa.RecordBatch:
    return to_arrow("segments", segments, run="run", attempt=1, producer="p", seq=0)


def with_lsn(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.append_column("lsn", pa.array(range(rows.num_rows), pa.int64()))


def test_schema_of_every_table_is_read_from_its_file() -> None:
    assert list(tables()) == ["payloads", "segments", "scores", "events", "consumption"]
    field = arrow_schema("segments").field("token_ids")
    assert field.type == pa.list_(pa.field("item", pa.int32()))
    assert not field.nullable
    assert arrow_schema("segments").field("reward").nullable


def test_every_column_says_what_it_means() -> None:
    missing = [
        (table.name, column.name)
        for table in (*tables().values(), *event_kinds().values())
        for column in table.columns
        if not column.comment
    ]
    assert missing == []
    assert "| `token_ids` | `integer[]` | no |" in reference()


def test_derived_columns_follow_from_spans() -> None:
    spans = [
        Span(len=2, source=TokenSource.USER),
        Span(len=1, source=TokenSource.POLICY, trainable=True, policy_version=3, kv_version=3, turn=0),
        Span(len=2, source=TokenSource.POLICY, trainable=False, policy_version=5, kv_version=3, turn=1),
    ]
    segment = make_segment(spans=spans)
    assert (segment.n_tokens, segment.n_sampled, segment.n_trainable, segment.num_turns) == (5, 3, 1, 2)
    assert (segment.version_min, segment.version_max) == (3, 5)


def test_null_logprob_is_not_zero_and_not_nan() -> None:
    column = encoded(make_segment(prompt=2, sampled=1))["behaviour_logprobs"]
    assert column.to_pylist() == [[None, None, -1.0]]


def test_valid_rows_pass_the_declared_checks() -> None:
    validate("segments", with_lsn(encoded(make_segment(0), make_segment(1))))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        ({"is_terminated": False, "is_truncated": False}, "is_terminated"),
        ({"purpose": "play"}, "purpose"),
        ({"spans": [Span(len=4, source=TokenSource.USER)]}, "spans do not cover the tokens"),
        ({"spans": [Span(len=5, source=TokenSource.USER, trainable=True)]}, "not sampled by the policy"),
        ({"purpose": "sft", "spans": [Span(len=5, source=TokenSource.USER, trainable=True)]}, "is no demonstration"),
        ({"behaviour_logprobs": np.zeros(4, np.float32)}, "behaviour_logprobs"),
        ({"prompt_id": None}, "NOT NULL"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_by_name(broken: dict[str, object], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        validate("segments", with_lsn(encoded(make_segment(**broken))))


def test_compressed_array_comes_back_and_is_named_by_what_is_stored() -> None:
    pixels = np.tile(np.array([-1, 0.5, 1], np.float32), 1000).reshape(3, 10, 100)
    payload = Payload.of_array("tensor", pixels, is_compressed=True)
    assert payload.dtype == "<f4+zstd" and payload.size_bytes < pixels.nbytes / 10
    assert np.array_equal(payload.to_array(), pixels) and payload.to_array().dtype == np.float32
    assert payload.payload_digest != Payload.of_array("tensor", pixels).payload_digest
    empty = Payload.of_array("tensor", np.zeros((0, 3), bool), is_compressed=True)
    assert empty.to_array().shape == (0, 3)


def test_segment_without_images_has_the_digest_it_had_before_there_were_any() -> None:
    batch = encoded(make_segment())
    assert batch["media"].to_pylist() == [None]
    older = batch.drop_columns(["media"])
    assert row_digests(older) == row_digests(batch)
    assert row_digests(encoded(make_image_segment(0, "a"))) != row_digests(encoded(make_image_segment(0, "b")))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        ({"media": None}, "image tokens without an image"),
        ({"media": [Medium(name="image", payload_digest="a", position=5, len=4)]}, "an image lies outside the tokens"),
    ],
)
def test_image_tokens_and_images_need_each_other(broken: dict[str, object], rule: str) -> None:
    validate("segments", with_lsn(encoded(make_image_segment(0, "a", "b"))))
    with pytest.raises(DataError, match=rule):
        validate("segments", with_lsn(encoded(make_image_segment(0, "a", **broken))))


def test_event_with_a_wrong_column_is_refused() -> None:
    with pytest.raises(DataError, match="'steps' is not in"):
        event("step_refused", step=1, reason="x", error="", n_sampled=1, steps=2)
    with pytest.raises(DataError, match="'reason' is missing"):
        event("step_refused", step=1, error="", n_sampled=1)
    with pytest.raises(DataError, match="n_sampled='many' is not a int64"):
        event("step_refused", step=1, reason="x", error="", n_sampled="many")
    with pytest.raises(DataError, match="has no file"):
        event("step_dreamt")


def test_event_column_shared_with_the_envelope_is_said_once() -> None:
    fact = event("step_refused", step=4, reason="x", error="", n_sampled=1)
    assert fact.step == 4
    assert fact.body["step"] == 4


def test_digest_is_the_same_for_a_slice_and_after_an_ipc_round_trip() -> None:
    rows = encoded(*(make_segment(index, sampled=index + 1) for index in range(10)))
    digests = rows["digest"].to_pylist()
    assert row_digests(rows.slice(3, 4)) == digests[3:7]
    message = make_message("p", 0, [1, 2])
    again: Message = pickle.loads(pickle.dumps(message))
    assert row_digests(again.tables["segments"]) == message.tables["segments"]["digest"].to_pylist()
    assert again.digest == message.digest


def test_digest_tells_null_from_nan_zero_and_absence() -> None:
    kind = pa.list_(pa.field("item", pa.float32()))
    lists = [None, [], [None], [0.0], [float("nan")], [None, None]]
    rows = pa.RecordBatch.from_arrays([pa.array(lists, kind)], names=["x"])
    assert len(set(row_digests(rows))) == len(lists)


def test_digest_of_an_old_row_survives_a_new_empty_column() -> None:
    rows = encoded(make_segment(0))
    grown = rows.append_column("note", pa.array([None], pa.string()))
    assert row_digests(grown) == row_digests(rows)
    assert row_digests(rows.append_column("note", pa.array([""], pa.string()))) != row_digests(rows)


def test_every_cell_counts_in_the_digest() -> None:
    rows = encoded(make_segment(0))
    before = row_digests(rows)[0]
    for name, value in {"reward": 0.5, "seq": 9, "stop_reason": "agent", "is_truncated": True, "token_ids": [0, 1, 2, 3, 5]}.items():
        place = rows.schema.get_field_index(name)
        changed = rows.set_column(place, rows.schema.field(name), pa.array([value], rows.schema.field(name).type))
        assert row_digests(changed)[0] != before, name


def test_merkle_root_depends_on_order_and_number() -> None:
    a, b, c = b"a" * 16, b"b" * 16, b"c" * 16
    roots = {merkle_root(leaves) for leaves in ([], [a], [a, b], [b, a], [a, b, c], [a, b, c, c])}
    assert len(roots) == 6


def test_payload_is_named_by_kind_shape_type_and_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    payload = Payload.of_array("routing", array)
    assert payload.payload_digest == Payload.of_array("routing", array.copy()).payload_digest
    assert payload.payload_digest != Payload.of_array("routing", array.reshape(3, 2)).payload_digest
    assert payload.size_bytes == 12


def test_scores_without_a_reference_are_null() -> None:
    score = Score(
        step=0,
        policy_version=0,
        segment_id="s",
        rank=0,
        trainer_logprobs=np.array([-1.0, -2.0], np.float32),
        advantages=np.zeros(2, np.float32),
        gate_weights=np.ones(2, np.float32),
    )
    rows = to_arrow("scores", [score], run="run", attempt=1, producer="p", seq=0)
    assert rows["reference_logprobs"].to_pylist() == [None]
    assert rows["n_sampled"].to_pylist() == [2]
    validate("scores", with_lsn(rows))
