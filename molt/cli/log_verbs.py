"""The verbs that look after a log: verify, seal, pin, fsck, compact, redact, drop, export, import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from molt.cli.numbers import Natural
from molt.cli.report import emit_json, emit_table
from molt.runs import open_run

if TYPE_CHECKING:
    from molt.log.verify import Finding

Switch = Annotated[bool, Parameter(negative="")]


def mount(app: App) -> None:
    """Add the verbs."""
    for name, function in verbs():
        app.command(function, name=name)
    pin = App(name="pin", help="Name one exact state of a log, and check it by digest.")
    for function in (create, list_, verify_, delete):
        pin.command(function, name=function.__name__.rstrip("_"))
    app.command(pin)


def verbs() -> list[tuple[str, Callable[..., Any]]]:
    """Name and function of each verb but the sub-verbs of pin."""
    return [
        ("verify", verify),
        ("seal", seal),
        ("fsck", fsck),
        ("compact", compact),
        ("redact", redact),
        ("drop", drop),
        ("export", export),
        ("import", import_),
    ]


def _place(run: str) -> str:
    """Address of a run: an object store's as it is, else the folder that the name or path stands for."""
    return run if run.startswith("s3://") else str(open_run(Path(run)).path)


def _show_findings(findings: list[Finding]) -> None:
    emit_table(("table", "file", "lsn", "what"), [(item.table, item.file, _span(item), item.what) for item in findings])


def _span(item: Finding) -> str:
    return "" if item.lsn_first is None else f"{item.lsn_first}..{item.lsn_last}"


def verify(run: str, *, json: Switch = False) -> int:
    """Read a whole log and check every row, the density of its order, and its seal. Leaves with 1 when something is wrong.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    json
        Print JSON.
    """
    from molt.log.verify import verify_log

    report = verify_log(_place(run))
    if json:
        emit_json({**asdict(report), "is_clean": report.is_clean})
    elif report.is_clean:
        rows = sum(report.num_rows.values())
        print(f"clean: {rows} rows to lsn {report.lsn_end}, {report.num_emptied} emptied, {report.num_lost} lost, root {report.root}")
    else:
        _show_findings(report.findings)
        print("not clean: molt fsck RUN --repair keeps what can be read and names what is lost")
    return 0 if report.is_clean else 1


def seal(run: str, *, json: Switch = False) -> None:
    """Compact a log and write SEAL.json: a digest of every file, and one root over all rows.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    json
        Print JSON.
    """
    from molt.log.core import existing_core
    from molt.log.seal import seal_log

    with existing_core(_place(run)) as core:
        made = seal_log(core)
    if json:
        emit_json(asdict(made))
    else:
        print(f"sealed to lsn {made.lsn_end}: {len(made.files)} files, root {made.root}")


def fsck(run: str, *, repair: Switch = False, json: Switch = False) -> int:
    """Examine a log that does not open or verify, and mend it if told to. Leaves with 1 while something is wrong.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    repair
        Set damaged files aside, keep the rows that are true, declare the rest lost.
    json
        Print JSON.
    """
    from molt.log.fsck import fsck as repair_log

    found = repair_log(_place(run), is_repairing=repair)
    if json:
        emit_json({**asdict(found), "is_clean": found.is_clean})
    else:
        _show_findings(found.found)
        for name in found.quarantined:
            print(f"set aside: {name}")
        for item in found.lost:
            print(f"lost: lsn {_span(item)}")
        print("clean" if found.is_clean else "not clean; run again with --repair" if not repair else "not clean: restore from a copy")
    return 0 if found.is_clean else 1


def compact(run: str, *, json: Switch = False) -> None:
    """Merge the fragments of every table and drop versions that no pin and no reader needs.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    json
        Print JSON.
    """
    from molt.log.core import existing_core
    from molt.log.upkeep import Upkeep

    done: list[dict[str, Any]] = []
    with existing_core(_place(run)) as core:
        upkeep = Upkeep(core)
        for table in core.tables.values():
            merged = upkeep.compact(table, is_full=True)
            done.append({"table": table.name, "fragments_merged": merged, "versions_dropped": upkeep.clean_up(table)})
    if json:
        emit_json(done)
    else:
        emit_table(("table", "fragments merged", "versions dropped"), [tuple(item.values()) for item in done])


def redact(run: str, rollout: str, *, reason: str, json: Switch = False) -> None:
    """Take the content of one rollout out of a log: tokens, log-probs, scores, payloads. Its scalars stay, so every sum closes.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    rollout
        rollout_id.
    reason
        Why; it stands in the tombstone.
    json
        Print JSON.
    """
    from molt.log.core import existing_core
    from molt.log.retention import redact_rollout

    with existing_core(_place(run)) as core:
        done = redact_rollout(core, rollout, reason=reason)
    if json:
        emit_json([asdict(item) for item in done])
    else:
        emit_table(("table", "rows", "bytes", "still held by"), [(i.table, i.num_rows, i.size_bytes, ", ".join(i.kept_by)) for i in done])


def drop(
    run: str,
    family: Literal["routing", "payloads", "scores", "tokens"],
    *,
    before_lsn: Natural,
    reason: str = "retention",
    json: Switch = False,
) -> None:
    """Take one family of heavy columns of old rows out of a log: routing, payloads, scores, tokens.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    family
        What to take out.
    before_lsn
        Rows before this lsn are emptied.
    reason
        Why; it stands in the tombstone.
    json
        Print JSON.
    """
    from molt.log.core import existing_core
    from molt.log.retention import Family, drop_family

    with existing_core(_place(run)) as core:
        done = drop_family(core, Family(family), before_lsn=before_lsn, reason=reason)
    if json:
        emit_json(asdict(done))
    else:
        held = f"; still held by {', '.join(done.kept_by)}" if done.kept_by else ""
        print(f"{done.num_rows} rows of {done.table} emptied, {done.size_bytes} bytes of blobs{held}")


def export(run: str, to: Path, *, pin: str | None = None, json: Switch = False) -> None:
    """Write a log as Parquet with page checksums, sorted by lsn, with the meaning of every column.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    to
        New folder.
    pin
        Export what this pin names instead of the newest state.
    json
        Print JSON.
    """
    from molt.log.export import export_log

    made = export_log(_place(run), to, pin=pin)
    if json:
        emit_json(asdict(made))
    else:
        emit_table(("table", "rows", "bytes"), [(name, item["rows"], item["size_bytes"]) for name, item in made.tables.items()])


def import_(source: Path, run: str, *, store: str = "durable", json: Switch = False) -> None:
    """Make a log from an export: the same rows under the same lsn, each checked against its digest.

    Parameters
    ----------
    source
        Folder that molt export made.
    run
        New folder of a run, or an s3:// address.
    store
        Storage profile.
    json
        Print JSON.
    """
    from molt.log.export import import_log

    made = import_log(source, run, store=store)
    if json:
        emit_json(asdict(made))
    else:
        print(f"imported to lsn {made.lsn_end}: root {made.root}")


def create(run: str, name: str, *, at: Natural | None = None, json: Switch = False) -> None:
    """Pin the log as it is now, or as of an lsn.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    name
        Name of the pin.
    at
        Largest lsn to pin.
    json
        Print JSON.
    """
    from molt.log.pin import create_pin

    made = create_pin(_place(run), name, at=at)
    if json:
        emit_json(asdict(made))
    else:
        print(f"pin {made.name}: lsn {made.lsn}, root {made.root}")


def list_(run: str, *, json: Switch = False) -> None:
    """List the pins of a log.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    json
        Print JSON.
    """
    from molt.log.pin import list_pins

    pins = list_pins(_place(run))
    if json:
        emit_json([asdict(pin) for pin in pins])
    else:
        emit_table(("pin", "lsn", "root"), [(pin.name, pin.lsn, pin.root) for pin in pins])


def verify_(run: str, name: str, *, json: Switch = False) -> int:
    """Check that a pin still names the rows it was made for. Leaves with 1 when it does not.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    name
        Name of the pin.
    json
        Print JSON.
    """
    from molt.log.pin import verify_pin

    wrong = verify_pin(_place(run), name)
    if json:
        emit_json({"pin": name, "is_true": not wrong, "wrong": wrong})
    else:
        print("\n".join(wrong) or f"pin {name}: true")
    return 1 if wrong else 0


def delete(run: str, name: str, *, json: Switch = False) -> None:
    """Let go of a pin: clean-up may then drop its versions.

    Parameters
    ----------
    run
        Folder or name of the run, or its s3:// address.
    name
        Name of the pin.
    json
        Print JSON.
    """
    from molt.log.pin import delete_pin

    delete_pin(_place(run), name)
    if json:
        emit_json({"pin": name, "deleted": True})
    else:
        print(f"pin {name}: deleted")
