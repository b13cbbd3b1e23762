"""Taking heavy content out of the log: by family for old rows, or for one rollout. Scalars, digests and a tombstone stay.

tombstone committed --> rows rewritten without their heavy columns --> old versions dropped --> bytes are gone
a crash in between leaves rows that still hold everything under a tombstone that says they may not; run it again
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from molt.errors import LogError, SettingError
from molt.log.batch import one_batch
from molt.log.checked import is_gone
from molt.log.core import LogCore
from molt.log.digest import merkle_root, row_digests
from molt.log.holds import holders
from molt.log.portions import WEIGHT
from molt.log.rows import Event, event, to_arrow
from molt.log.table import LogTable, storable
from molt.log.tombstone import KIND, runs_of, tombstones_of
from molt.log.upkeep import Upkeep, runs_within


class Family(StrEnum):
    """What can be dropped, lightest loss first."""

    ROUTING = "routing"
    """Payloads of kind routing."""
    PAYLOADS = "payloads"
    """All payloads; like those of routing, none that a resumed run may need."""
    SCORES = "scores"
    """Per-token lists of scores."""
    TOKENS = "tokens"
    """Token ids and log-probs of segments."""


_NUM_CHECKPOINTS = 2
"""Newest checkpoints that a profile leaves something to resume from: the newest may turn out damaged."""
_LOOK_ROWS = 64
"""Rows at a time when a held version is looked at."""
_PART_BYTES = 256 << 20
"""Content that is emptied at a time."""
_TABLE = {Family.ROUTING: "payloads", Family.PAYLOADS: "payloads", Family.SCORES: "scores", Family.TOKENS: "segments"}
HEAVY = {
    "payloads": ("data",),
    "scores": ("trainer_logprobs", "reference_logprobs", "teacher_logprobs", "values", "advantages", "gate_weights"),
    "segments": ("token_ids", "behaviour_logprobs"),
}
"""Columns that emptying clears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emptied:
    """What one call took out."""

    table: str
    num_rows: int
    size_bytes: int
    kept_by: tuple[str, ...]
    """Pins and readers whose versions still hold the content; once they are gone, the same call takes it."""


def drop_family(core: LogCore, family: Family, *, before_lsn: int, reason: str, needed_from: int | None = None) -> Emptied:
    """Empty the rows of a family before an lsn. Tokens only before needed_from, first_needed when absent, and no payload that a segment
    from there on names: an image is stored once, however often it is shown."""
    if needed_from is None:
        needed_from = first_needed(core)
    where = f"lsn < {before_lsn}"
    if family is Family.ROUTING:
        where += " and kind = 'routing'"
    if _TABLE[family] == "payloads" and (needed := _needed(core, needed_from)):
        where += f" and payload_digest not in ({_quoted(sorted(needed))})"
    if family is Family.TOKENS and before_lsn > needed_from:
        raise SettingError(
            f"before_lsn={before_lsn}: a resumed run may train the segment at lsn {needed_from}, whose group was neither dropped nor "
            f"trained before its last checkpoint; give at most {needed_from}"
        )
    return _empty(core, _TABLE[family], where, family=str(family), reason=reason, rollout_id=None)


def apply_retention(core: LogCore, *, is_beginning: bool = False) -> list[Emptied]:
    """Empty what the profile does not keep, once a quarter more than that has gathered.

    is_beginning: nobody of the attempt has written yet. Images go only then: a worker sends each of them once, and goes on to name it.
    """
    kept = core.store.retention
    limits = {
        Family.ROUTING: min((most for most in (kept.routing_rows, kept.payload_rows) if most is not None), default=None),
        Family.PAYLOADS: kept.payload_rows if is_beginning else None,
        Family.SCORES: kept.score_rows,
        Family.TOKENS: kept.token_rows,
    }
    done: list[Emptied] = []
    needed_from: int | None = None
    for family, most in limits.items():
        if most is None:
            continue
        where = "kind = 'routing'" if family is Family.ROUTING else None
        events = core.tables["events"].dataset.to_table(columns=["kind", "body"], filter=f"kind = '{KIND}'")
        gone = tombstones_of(events).emptied(_TABLE[family])
        rows = core.tables[_TABLE[family]].dataset.to_table(columns=["lsn"], filter=where)["lsn"].to_pylist()
        full = sorted(lsn for lsn in rows if lsn not in gone)
        if len(full) <= most + most // 4:
            continue
        before = full[len(full) - most]
        if needed_from is None:
            needed_from = first_needed(core, num_checkpoints=_NUM_CHECKPOINTS)
        if family is Family.TOKENS:
            before = min(before, needed_from)
        if before <= full[0]:
            continue
        reason = f"the profile {core.store.name} keeps {most} rows"
        done.append(drop_family(core, family, before_lsn=before, reason=reason, needed_from=needed_from))
    return done


def first_needed(core: LogCore, *, num_checkpoints: int = 1) -> int:
    """lsn of the first segment whose group was neither dropped nor trained before the oldest of the newest checkpoints, so many as
    given; past the last row where there is none. Without that many checkpoints a run may begin again, and needs all that it trained."""
    kinds = "('attempt_started', 'checkpoint_saved', 'group_decided')"
    facts = core.tables["events"].dataset.to_table(columns=["lsn", "kind", "body"], filter=f"kind in {kinds}").sort_by("lsn")
    bodies = [(kind, orjson.loads(body)) for kind, body in zip(facts["kind"].to_pylist(), facts["body"].to_pylist(), strict=True)]
    saved = _standing_checkpoints(bodies)
    step = saved[-num_checkpoints] if len(saved) >= num_checkpoints else 0
    used = core.tables["consumption"].dataset.to_table(columns=["group_id", "step"])
    is_before = pc.less(used["step"], step)
    done = {body["group_id"] for kind, body in bodies if kind == "group_decided" and body["decision"] != "admitted"}
    done |= set(used["group_id"].filter(is_before).to_pylist())
    done -= set(used["group_id"].filter(pc.invert(is_before)).to_pylist())
    segments = core.tables["segments"].dataset.to_table(columns=["lsn", "group_id"], filter="purpose <> 'eval'")
    is_needed = pc.invert(pc.is_in(segments["group_id"], pa.array(list(done), pa.string())))
    return min(segments["lsn"].filter(is_needed).to_pylist(), default=core.state.lsn_end + 1)


def _standing_checkpoints(facts: Iterable[tuple[str, dict[str, Any]]]) -> list[int]:
    """Steps of the checkpoints that a resumed run may find, in order. facts: kind and body, by lsn. A run that went on from an earlier
    step had passed over the later ones."""
    saved: list[int] = []
    for kind, body in facts:
        if kind == "attempt_started" and body["resumed_from_step"] is not None:
            saved = [step for step in saved if step <= body["resumed_from_step"]]
        elif kind == "checkpoint_saved":
            saved = [step for step in saved if step < body["step"]] + [body["step"]]
    return saved


def _needed(core: LogCore, needed_from: int) -> set[str]:
    """Payloads of segments from an lsn on."""
    where = f"{_NAMES_ANY} and lsn >= {needed_from}"
    return _named_by(core.tables["segments"].dataset.to_table(columns=list(_NAMING), filter=where))


def redact_rollout(core: LogCore, rollout_id: str, *, reason: str) -> list[Emptied]:
    """Empty the segments of a rollout, its scores, and the payloads that no other rollout shares.
    Its group, if it waits, will not train."""
    quoted = rollout_id.replace("'", "''")
    segments = core.tables["segments"].dataset
    mine = segments.to_table(columns=["segment_id", "group_id", *_NAMING], filter=f"rollout_id = '{quoted}'")
    if not len(mine):
        raise LogError(f"rollout_id={rollout_id}: no such rollout in {core.home.where}")
    _withdraw(core, str(mine["group_id"][0]), reason=reason)
    blobs = _named_by(mine)
    if blobs:
        blobs -= _named_by(segments.to_table(columns=list(_NAMING), filter=f"{_NAMES_ANY} and rollout_id <> '{quoted}'"))
    done = [_empty(core, "segments", f"rollout_id = '{quoted}'", family="rollout", reason=reason, rollout_id=rollout_id)]
    names = _quoted(mine["segment_id"].to_pylist())
    done.append(_empty(core, "scores", f"segment_id in ({names})", family="rollout", reason=reason, rollout_id=rollout_id))
    if blobs:
        where = f"payload_digest in ({_quoted(blobs)})"
        done.append(_empty(core, "payloads", where, family="rollout", reason=reason, rollout_id=rollout_id))
    return done


def _withdraw(core: LogCore, group_id: str, *, reason: str) -> None:
    """Decide a group that waits and that no plan has taken: a resumed run would admit it, and could not read the rollout."""
    kinds = "('group_dispatched', 'group_decided', 'batch_planned')"
    facts = core.tables["events"].dataset.to_table(columns=["kind", "body"], filter=f"kind in {kinds}")
    is_waiting = False
    for kind, body in zip(facts["kind"].to_pylist(), map(orjson.loads, facts["body"].to_pylist()), strict=True):
        if kind == "batch_planned" and group_id in body["groups"]:
            return
        if kind != "batch_planned" and body["group_id"] == group_id:
            if body.get("decision", "admitted") != "admitted" or body.get("purpose", "train") != "train":
                return
            is_waiting = True
    if not is_waiting:
        return
    rows = core.tables["segments"].dataset.to_table(columns=["rollout_id", "n_sampled"], filter=f"group_id in ({_quoted([group_id])})")
    verdict = event(
        "group_decided",
        group_id=group_id,
        decision="incomplete",
        reason=f"a rollout of it was redacted: {reason}",
        num_rollouts=pc.count_distinct(rows["rollout_id"]).as_py(),
        num_failed=0,
        n_sampled=pc.sum(rows["n_sampled"]).as_py(),
    )
    _tell(core, verdict)


def _tell(core: LogCore, fact: Event) -> None:
    """Commit one fact as a group of its own."""
    producer = f"log.{core.state.epoch}.{core.state.group}"
    core.commit_group({"events": [to_arrow("events", [fact], run=core.run, attempt=core.state.attempt, producer=producer, seq=0)]}, {})


_NAMING = ("routing_digest", "media")
"""Columns of segments that name payloads."""
_NAMES_ANY = "(routing_digest is not null or media is not null)"


def _named_by(segments: pa.Table) -> set[str]:
    """Payloads that segments name."""
    routes = {name for name in segments["routing_digest"].to_pylist() if name is not None}
    return routes | {medium["payload_digest"] for cell in segments["media"].to_pylist() for medium in cell or ()}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join("'" + name.replace("'", "''") + "'" for name in names)


def _cleared(table: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with their heavy columns empty."""
    arrays = []
    for field in rows.schema:
        if field.name not in HEAVY[table]:
            arrays.append(rows[field.name])
        elif table == "payloads":
            arrays.append(pa.array([b""] * rows.num_rows, field.type))
        else:
            present = rows[field.name].is_valid().to_pylist()
            arrays.append(pa.array([[] if valid else None for valid in present], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def _empty(core: LogCore, table: str, where: str, *, family: str, reason: str, rollout_id: str | None) -> Emptied:
    """Write tombstones, rewrite the rows, drop the versions that held them; a bounded number of bytes at a time."""
    core.roll_forward()
    held = core.tables[table]
    column, width = WEIGHT[table]
    light = held.dataset.to_table(columns=["lsn", column], filter=where).sort_by("lsn")
    lsns, weights = light["lsn"].to_pylist(), [width * number for number in light[column].to_pylist()]
    num_rows = size = 0
    for part in runs_within(weights, most=_PART_BYTES):
        bounds = f"({where}) and lsn >= {lsns[part[0]]} and lsn <= {lsns[part[-1]]}"
        found = _empty_part(core, held, bounds, family=family, reason=reason, rollout_id=rollout_id)
        num_rows += found.num_rows
        size += sum(found["size_bytes"].to_pylist()) if table == "payloads" else 0
    if lsns:  # also when nothing is left to empty: the call before may have died here, or met a pin that is gone
        upkeep = Upkeep(core)
        if num_rows or any(fragment.metadata.deletion_file for fragment in held.dataset.get_fragments()):
            upkeep.compact(held, is_full=True)
        upkeep.clean_up(held, keep=1)
    return Emptied(table=table, num_rows=num_rows, size_bytes=size, kept_by=_keepers(core, held, where) if lsns else ())


def _empty_part(core: LogCore, held: LogTable, where: str, *, family: str, reason: str, rollout_id: str | None) -> pa.RecordBatch:
    """Empty the rows that still hold something, under a tombstone of their own; the rows as they were."""
    events = core.tables["events"].dataset.to_table(columns=["kind", "body"], filter=f"kind = '{KIND}'")
    options = {"blob_handling": "all_binary"} if held.name == "payloads" else {}
    found = one_batch(held.dataset.to_table(filter=where, **options).sort_by("lsn"))
    gone = tombstones_of(events).emptied(held.name)
    cleared = _cleared(held.name, found)
    is_full = pa.array(
        [
            lsn not in gone or now != left
            for lsn, now, left in zip(found["lsn"].to_pylist(), row_digests(found), row_digests(cleared), strict=True)
        ],
        pa.bool_(),
    )
    found, cleared = found.filter(is_full), cleared.filter(is_full)
    if found.num_rows:
        _bury(core, held.name, found, cleared, family=family, reason=reason, rollout_id=rollout_id)
        _rewrite(core, held, cleared)
        if held.name == "payloads":
            core.forget_payloads()
    return found


def _keepers(core: LogCore, table: LogTable, where: str) -> tuple[str, ...]:
    """Pins and readers whose version of the table still shows content of the rows."""
    held = holders(core.home, table.name)
    full = {version for version in set(held.values()) if version < table.dataset.version and _is_full(table, version, where)}
    return tuple(sorted(name for name, version in held.items() if version in full))


def _is_full(table: LogTable, version: int, where: str) -> bool:
    options = {"blob_handling": "all_binary"} if table.name == "payloads" else {}
    try:
        batches = table.dataset.checkout_version(version).scanner(filter=where, batch_size=_LOOK_ROWS, **options).to_batches()
        rows = (one_batch(pa.Table.from_batches([batch])) for batch in batches)
        return any(row_digests(part) != row_digests(_cleared(table.name, part)) for part in rows)
    except (OSError, ValueError) as error:
        if is_gone(error):
            return False
        raise


def _bury(
    core: LogCore, table: str, found: pa.RecordBatch, cleared: pa.RecordBatch, *, family: str, reason: str, rollout_id: str | None
) -> None:
    def total(name: str) -> int:
        return sum(found[name].to_pylist()) if name in found.schema.names else 0

    fact = event(
        KIND,
        family=family,
        table_name=table,
        rollout_id=rollout_id,
        lsn_runs=orjson.dumps(runs_of(found["lsn"].to_pylist())).decode(),
        num_rows=found.num_rows,
        size_bytes=total("size_bytes"),
        n_tokens=total("n_tokens"),
        n_sampled=total("n_sampled"),
        root=merkle_root(found["digest"].to_pylist()).hex(),
        left_root=merkle_root(row_digests(cleared)).hex(),
        reason=reason,
    )
    _tell(core, fact)


def _rewrite(core: LogCore, table: LogTable, rows: pa.RecordBatch) -> None:
    """Replace the rows, found by lsn, as exactly the next version; the new files are durable before it."""
    source = storable(table.name, pa.Table.from_batches([rows]), table.schema)
    transaction, _ = table.dataset.merge_insert("lsn").when_matched_update_all().execute_uncommitted(source)
    if core.store.is_synced:
        table.sync([*transaction.operation.new_fragments, *transaction.operation.updated_fragments])
    table.commit_operation(transaction.operation, core.state.stamp(table.name, "carry"))
    table.open()
    if core.store.is_synced:
        table.sync([])
