"""Files cut at every byte and bits flipped in every kind of file: nothing damaged may reach a reader that feeds a gradient.

    outcome of a read   equal     every row came back as written (the damage hit bytes that this read does not need)
                        refused   CorruptLogError or LogError
                        silent    other rows came back: never allowed
                        crashed   the process died; not silent, and counted

Run: python -m tools.faults.damage --flips 1000
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt.errors import MoltError
from molt.log.core import existing_core
from molt.log.heal import heal_table
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Payload
from molt.log.seal import seal_log
from molt.log.store import load_store
from molt.log.verify import verify_log
from molt.log.writer import LogWriter
from tools.faults.evidence import keep
from tools.faults.rows import fact, segment
from tools.faults.spawn import in_child

NUM_SEGMENTS = 6
SEGMENT_IDS = [f"e0-p{number}/0/0/0" for number in range(NUM_SEGMENTS)]


@dataclass(slots=True, kw_only=True)
class Damage:
    """What one campaign saw."""

    tried: int = 0
    reads: Counter[str] = field(default_factory=Counter)
    """Outcomes of reads that feed a gradient."""
    named: int = 0
    """Damages that verification found."""
    located: int = 0
    """Of these: with the damaged file, and for data files the rows."""
    harmless: int = 0
    """Damages that verification did not find and that changed no row: bytes that nothing reads."""
    missed: list[str] = field(default_factory=list)
    """Damages that verification did not find although a row changed."""

    def add(self, other: Damage) -> None:
        """Sum up."""
        self.tried += other.tried
        self.reads += other.reads
        self.named += other.named
        self.located += other.located
        self.harmless += other.harmless
        self.missed += other.missed


def make_log(run_dir: str, *, is_sealed: bool) -> None:
    """A small log with rows in every table and blobs small and large."""
    with LogWriter.open(run_dir, run="run", store=load_store("process")) as writer:
        producer = Producer(writer, "p")
        for number in range(NUM_SEGMENTS):
            blob = Payload(kind="routing", data=bytes([number]) * (200 if number % 2 else 70_000), dtype="|u1")
            producer.append_sync(segments=[segment(0, number, 24)], events=[fact(0, number)], payloads=[blob])
    if is_sealed:
        with existing_core(run_dir) as core:
            seal_log(core)


def truth_of(run_dir: str) -> tuple[bytes, ...]:
    """What a gradient would see: tokens, log-probs, sources, versions, rewards, and every payload."""
    cut = LogReader.open(run_dir).cut()
    batch = cut.segments(SEGMENT_IDS)
    parts = [batch.token_ids_T, batch.behaviour_logprobs_T, batch.source_T, batch.policy_version_T, batch.is_trainable_T]
    names = sorted(cut.table("payloads", ["payload_digest"])["payload_digest"].to_pylist())
    return (*(part.tobytes() for part in parts), repr(batch.scalars.to_pylist()).encode(), *(cut.payload(name).data for name in names))


def read_outcome(run_dir: str, truth: tuple[bytes, ...]) -> str:
    """How a read that feeds a gradient ends."""
    try:
        return "equal" if truth_of(run_dir) == truth else "silent"
    except MoltError:
        return "refused"


def _flip_some(run_dir: str, flips: list[tuple[str, int, int]], truth: tuple[bytes, ...]) -> Damage:
    seen = Damage()
    for name, place, bit in flips:
        path = Path(run_dir) / "log" / name
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        seen.tried += 1
        outcome = read_outcome(run_dir, truth)
        seen.reads[outcome] += 1
        findings = verify_log(run_dir).findings
        path.write_bytes(whole)
        if findings:
            seen.named += 1
            is_data = "/data/" in name
            seen.located += any(
                (finding.file == name and (not is_data or finding.lsn_first is not None)) or name.split("/")[-1] in finding.what
                for finding in findings
            )
        elif outcome == "silent":
            seen.missed.append(f"{name} byte {place} bit {bit}")
        else:
            seen.harmless += 1
    return seen


def flip_bits(run_dir: str, flips: int, seed: int) -> tuple[Damage, dict[str, Damage]]:
    """Flip seeded bits, spread evenly over the kinds of files; each flip is undone before the next."""
    chance = random.Random(seed)
    root = Path(run_dir) / "log"
    kinds: dict[str, list[str]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = str(path.relative_to(root))
        kind = "LOG.json" if name == "LOG.json" else "SEAL.json" if name == "SEAL.json" else _kind(name)
        if kind and path.stat().st_size:
            kinds.setdefault(kind, []).append(name)
    truth = in_child(truth_of, run_dir)
    total, by_kind = Damage(), {}
    for kind, names in sorted(kinds.items()):
        chosen = []
        for _ in range(-(-flips // len(kinds))):
            name = chance.choice(names)
            chosen.append((name, chance.randrange((root / name).stat().st_size), chance.randrange(8)))
        seen = Damage()
        for start in range(0, len(chosen), 40):
            seen.add(_survived(run_dir, chosen[start : start + 40], truth))
        by_kind[kind] = seen
        total.add(seen)
    return total, by_kind


def _survived(run_dir: str, flips: list[tuple[str, int, int]], truth: tuple[bytes, ...]) -> Damage:
    """A portion of flips in one child; when a flip kills it, one by one."""
    root = Path(run_dir) / "log"
    wholes = {name: (root / name).read_bytes() for name, _, _ in flips}
    try:
        return in_child(_flip_some, run_dir, flips, truth)
    except AssertionError as error:
        print(error, flips if len(flips) == 1 else "", flush=True)
        for name, content in wholes.items():
            (root / name).write_bytes(content)
        if len(flips) == 1:
            return _crashed(run_dir, *flips[0])
        seen = Damage()
        for flip in flips:
            seen.add(_survived(run_dir, [flip], truth))
        return seen


def _crashed(run_dir: str, name: str, place: int, bit: int) -> Damage:
    """A flip that ended the process of its reader: does verification live through it, and name it?"""
    path = Path(run_dir) / "log" / name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        findings = in_child(verify_log, run_dir).findings
    finally:
        path.write_bytes(whole)
    is_located = any(finding.file == name for finding in findings)
    return Damage(tried=1, reads=Counter(crashed=1), named=int(bool(findings)), located=int(is_located))


def _kind(name: str) -> str:
    if name.endswith(".manifest"):
        return "manifest"
    if name.endswith(".txn"):
        return "transaction"
    if name.endswith(".blob"):
        return "blob"
    if "/data/" in name:
        return "data of " + name.split(".lance")[0]
    return ""


def _newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=os.path.getmtime)


def cut_data(run_dir: str, table: str, step: int) -> Damage:
    """Cut the newest data file of a table at every byte."""
    path = _newest(Path(run_dir) / "log" / f"{table}.lance" / "data", "*.lance")
    return _cut(run_dir, path, step, range(path.stat().st_size))


def cut_manifest(run_dir: str, table: str, step: int) -> Damage:
    """Cut the newest manifest of a table at every byte."""
    versions = Path(run_dir) / "log" / f"{table}.lance" / "_versions"
    path = min(versions.glob("*.manifest"))
    return _cut(run_dir, path, step, range(path.stat().st_size))


def _cut(run_dir: str, path: Path, step: int, places: range) -> Damage:
    truth = truth_of(run_dir)
    whole, seen = path.read_bytes(), Damage()
    for place in places[::step]:
        path.write_bytes(whole[:place])
        seen.tried += 1
        seen.reads[read_outcome(run_dir, truth)] += 1
        path.write_bytes(whole)
    return seen


def heal_cuts(run_dir: str, table: str, step: int) -> dict[str, int]:
    """Cut the newest manifest at every byte; each time a writer sets it aside and finds the lost commit in the transaction file."""
    reader = LogReader.open(run_dir)
    versions = Path(run_dir) / "log" / f"{table}.lance" / "_versions"
    path = min(versions.glob("*.manifest"))
    whole, figures = path.read_bytes(), Counter[str]()
    for place in range(0, len(whole), step):
        path.write_bytes(whole[:place])
        healing = heal_table(reader.home, table)
        figures["cut"] += 1
        figures["healed"] += healing is not None
        figures["lost commit found"] += healing is not None and len(healing.redo) == 1
        path.write_bytes(whole)
    return dict(figures)


def reopen_cuts(run_dir: str, table: str, step: int) -> dict[str, int]:
    """Cut the newest manifest, open a writer on a copy, and compare every row."""
    truth = truth_of(run_dir)
    figures = Counter[str]()
    size = min((Path(run_dir) / "log" / f"{table}.lance" / "_versions").glob("*.manifest")).stat().st_size
    for place in range(0, size, step):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(run_dir, f"{folder}/run")
            path = min((Path(folder) / "run" / "log" / f"{table}.lance" / "_versions").glob("*.manifest"))
            os.truncate(path, place)
            with LogWriter.open(f"{folder}/run", run="run", store=load_store("process")):
                pass
            figures["reopened"] += 1
            figures["complete"] += truth_of(f"{folder}/run") == truth and not verify_log(f"{folder}/run").findings
    return dict(figures)


def last_commit_only(run_dir: str) -> None:
    """A log whose newest manifest of segments is a group with rows."""
    writer = LogWriter.open(run_dir, run="run", store=load_store("process"))
    producer = Producer(writer, "p")
    for number in range(NUM_SEGMENTS):
        producer.append_sync(segments=[segment(0, number, 24)], payloads=[Payload(kind="image", data=bytes([number]) * 300)])
    writer.close()


def figures_of(seen: Damage) -> dict[str, Any]:
    """As JSON."""
    return {
        "tried": seen.tried,
        "reads": dict(seen.reads),
        "named by verify": seen.named,
        "with file and rows": seen.located,
        "harmless": seen.harmless,
        "missed": seen.missed,
    }


def keep_flips(folder: str, flips: int) -> None:
    """Flip bits in a sealed log."""
    sealed = f"{folder}/sealed"
    in_child(_make_sealed, sealed)
    total, by_kind = flip_bits(sealed, flips, seed=0)
    print(figures_of(total), flush=True)
    claims = {
        "1,000 flips": total.tried >= 1000,
        "none reaches a reader that feeds a gradient": total.reads["silent"] == 0,
        "each is named by verify with its file": total.named == total.tried == total.located,
        "at most 5 of 1,000 end the process of a reader, and verification lives through them": total.reads["crashed"] <= 5,
    }
    figures = {"all": figures_of(total), "by kind of file": {kind: figures_of(seen) for kind, seen in by_kind.items()}}
    print(keep("log-faults-bits", figures, claims=claims))


def keep_cuts(folder: str, step: int) -> None:
    """Cut the newest files of a log that was just written."""
    loose, cuts = f"{folder}/loose", {}
    in_child(last_commit_only, loose)
    for table in ("segments", "payloads"):
        cuts[f"data of {table}"] = figures_of(in_child(cut_data, loose, table, step, limit_s=3000))
        cuts[f"manifest of {table}"] = figures_of(in_child(cut_manifest, loose, table, step, limit_s=3000))
    healed = in_child(heal_cuts, loose, "segments", step, limit_s=3000)
    reopened = in_child(reopen_cuts, loose, "segments", 64 * step, limit_s=3000)
    claims = {
        "none reaches a reader that feeds a gradient": all(seen["reads"].get("silent", 0) == 0 for seen in cuts.values()),
        "every cut manifest heals and its commit is found": len(set(healed.values())) == 1,
        "a reopened log is complete": len(set(reopened.values())) == 1,
    }
    print(keep("log-faults-cuts", {"reads": cuts, "heal": healed, "reopen": reopened, "step": step}, claims=claims))


def main() -> None:
    """Run the campaigns and keep the evidence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000, help="bits to flip; 0 leaves them")
    parser.add_argument("--step", type=int, default=1, help="cut at every step-th byte; 0 cuts nothing")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.flips:
            keep_flips(folder, chosen.flips)
        if chosen.step:
            keep_cuts(folder, chosen.step)


def _make_sealed(run_dir: str) -> None:
    make_log(run_dir, is_sealed=True)


if __name__ == "__main__":
    main()
