"""What keeps a log fast for months: few fragments, few versions, small manifests. Runs in the writer between commits.

    fragments of a table, oldest first      [ big ][ big ][ mid ][ s ][ s ] ... [ s ]     more than max_fragments?
    tiny ones encoded anew                                        [ one fragment of s ]       a copy would keep the overhead of each page
    else merged by binary copy              [ big ][ big ][ one of mid and those after it ]   up to a neighbour twice the run's weight

Merging only newest runs rewrites a row about log(n) times and never holds more than one batch in memory.
A version goes when it is neither among the newest, nor pinned, nor read by a live reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import lance
import orjson
import pyarrow.compute as pc
from lance.optimize import Compaction, RewriteResult

from molt.errors import FencedError, LogError
from molt.log.core import LogCore
from molt.log.crash import crashpoint
from molt.log.holds import held_versions
from molt.log.table import Fence, LogTable

_MANY = 1 << 40
_TRIM_GROUPS = 512
"""Groups between two returns of memory to the system."""
_TINY_ROWS = 32
"""Rows under which a fragment is encoded anew, not copied: each copied page keeps its own overhead."""
_BATCH_BYTES = 16 << 20
"""What a merge that has to decode holds at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something that upkeep should have bounded and did not."""

    table: str
    what: str
    value: float
    limit: float


def run_to_merge(weights: list[int], *, heaviest: int) -> int:
    """How many of the newest fragments to merge: the newer half, and each older neighbour of at most twice their weight together."""
    count = total = 0
    for weight in reversed(weights):
        if weight >= heaviest or (count >= len(weights) // 2 and weight > 2 * total):
            break
        count, total = count + 1, total + weight
    return count if count > 1 else 0


def num_tiny(fragments: list[lance.LanceFragment]) -> int:
    """How many of the newest fragments hold so few rows that their pages outweigh their content; 0 unless it pays to encode them anew."""
    count = 0
    for fragment in reversed(fragments):
        if fragment.metadata.physical_rows >= _TINY_ROWS:
            break
        count += 1
    return count if count >= 8 else 0


def runs_within(sizes: list[int], *, most: int) -> list[range]:
    """All fragments as runs of neighbours that weigh no more than `most` together."""
    runs, start, total = [], 0, 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            runs.append(range(start, place))
            start, total = place, 0
        total += size
    return [*runs, range(start, len(sizes))] if sizes else []


class Sizes:
    """Bytes of fragments, blobs included, looked up once each."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}

    def forget(self, table: str, live: set[int]) -> None:
        """Drop fragments that were merged away."""
        self._known = {key: size for key, size in self._known.items() if key[0] != table or key[1] in live}

    def of(self, table: LogTable, fragment: lance.LanceFragment) -> int:
        """Bytes of a fragment; Lance does not count blobs, and forgets the size of what it merged."""
        key = table.name, fragment.fragment_id
        if key not in self._known:
            sizes = [file.file_size_bytes for file in fragment.metadata.files]
            if not all(sizes):
                listed = table.home.sizes(table.name)
                sizes = [listed.get(f"data/{file.path}", 0) for file in fragment.metadata.files]
            blobs = 0
            if table.name == "payloads":
                rows = table.dataset.scanner(columns=["size_bytes"], fragments=[fragment]).to_table()
                blobs = pc.sum(rows["size_bytes"]).as_py() or 0
            self._known[key] = sum(int(size or 0) for size in sizes) + blobs
        return self._known[key]


def give_back_memory() -> None:
    """Ask the C library for the pages that it keeps after frees: many commits leave them scattered."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class StepFence(Fence):
    """Lets a row of versions through, one after the other, from the expected one on."""

    @contextlib.contextmanager
    def __call__(self, version: int) -> Iterator[None]:
        """As Fence, then expects the next."""
        with super().__call__(version):
            yield
        self.expected += 1


class Upkeep:
    """Used by the writer's thread only, when no group is half committed."""

    def __init__(self, core: LogCore) -> None:
        self._core = core
        self._settings = core.store.upkeep
        self._sizes = Sizes()
        self._trimmed_at = core.state.group
        self._since_clean_up = dict.fromkeys(core.tables, 0)
        self._newest: dict[str, deque[tuple[float, int]]] = {name: deque() for name in core.tables}
        """When which version was seen to be the newest: one that was, less than grace_s ago, may just have been opened."""

    def run(self) -> list[Alarm]:
        """Compact and clean up what is due; the alarms of this round."""
        alarms: list[Alarm] = []
        if self._core.pending is not None:
            return alarms
        for name, table in self._core.tables.items():
            seen = self._newest[name]
            if not seen or seen[-1][1] != table.dataset.version:
                seen.append((time.monotonic(), table.dataset.version))
            if table.num_fragments > self._settings.max_fragments:
                self.compact(table)
            if table.dataset.version - self._since_clean_up[name] >= self._settings.keep_versions:
                self._since_clean_up[name] = table.dataset.version
                self.clean_up(table, before=self._settled(name))
                alarms += self._alarms(table)
        if self._core.state.group >= self._trimmed_at + _TRIM_GROUPS:
            self._trimmed_at = self._core.state.group
            self._renew()
        return alarms

    def _renew(self) -> None:
        """Open the tables with empty caches: what Lance keeps per commit, some kilobytes that no bound of a cache counts, is freed."""
        self._core.home.renew_session()
        for table in self._core.tables.values():
            table.reopen()
        give_back_memory()

    def _settled(self, table: str) -> int:
        """The version that was newest grace_s ago; older ones are open to nobody who does not hold them."""
        seen, limit = self._newest[table], time.monotonic() - self._settings.grace_s
        while len(seen) > 1 and seen[1][0] <= limit:
            seen.popleft()
        return seen[0][1] if seen and seen[0][0] <= limit else 0

    def compact(self, table: LogTable, *, is_full: bool = False) -> int:
        """Merge fragments; the number that went away. The content, its order and its row ids stay as they are."""
        fragments = table.dataset.get_fragments()
        self._sizes.forget(table.name, {fragment.fragment_id for fragment in fragments})
        sizes = [self._sizes.of(table, fragment) for fragment in fragments]
        if is_full:
            runs = runs_within(sizes, most=self._settings.target_bytes)
        else:
            count = num_tiny(fragments) or run_to_merge(sizes, heaviest=self._settings.target_bytes)
            runs = [range(len(fragments) - count, len(fragments))]
        for run in runs:
            chosen = [fragments[place] for place in run]
            if len(chosen) > 1 or any(fragment.metadata.deletion_file for fragment in chosen):
                self._merge(table, {fragment.fragment_id for fragment in chosen}, sum(sizes[place] for place in run))
        return len(fragments) - len(table.dataset.get_fragments())

    def _merge(self, table: LogTable, chosen: set[int], size: int) -> None:
        """Rewrite those neighbours as one, and carry the state of the log over to the new version."""
        crashpoint("upkeep.before_compact")
        home, others = self._core.home, [item.fragment_id for item in table.dataset.get_fragments() if item.fragment_id not in chosen]
        fence = StepFence(table.dataset.version + 1)
        dataset = lance.LanceDataset(table.uri, storage_options=home.storage_options, session=home.session, commit_lock=fence)
        if dataset.version != table.dataset.version:
            raise FencedError(f"log={home.where}: table {table.name} moved to version {dataset.version}; another writer took the run")
        rows = sum(item.metadata.physical_rows for item in dataset.get_fragments() if item.fragment_id in chosen)
        plan = Compaction.plan(
            dataset,
            {
                "compaction_mode": "reencode" if rows < _TINY_ROWS * len(chosen) else "try_binary_copy",
                "target_rows_per_fragment": _MANY,
                "max_bytes_per_file": _MANY,
                "materialize_deletions_threshold": 0.0,
                "num_threads": 1,
                "batch_size": max(1, min(8192, _BATCH_BYTES * rows // max(size, 1))),
                "excluded_fragment_ids": others,
            },
        )
        results = [_without_version_lists(task.execute(dataset)) for task in plan.tasks]
        crashpoint("upkeep.after_rewrite")
        if not results:
            return
        if self._core.store.is_synced:
            table.sync([fragment for result in results for fragment in result.new_fragments])
        try:
            Compaction.commit(dataset, results)
        except OSError as error:
            kind = FencedError if fence.met is not None else LogError
            raise kind(f"log={home.where}: table {table.name}: compaction failed; {error}") from error
        table.open()
        crashpoint("upkeep.after_compact")
        table.commit([], self._core.state.stamp(table.name, "carry"))
        if self._core.store.is_synced:
            table.sync([])

    def clean_up(self, table: LogTable, *, keep: int | None = None, before: int = _MANY) -> int:
        """Drop versions older than `before` that nobody needs, and the files that only they name; the number of versions dropped."""
        crashpoint("upkeep.before_cleanup")
        needed = held_versions(self._core.home, table.name)
        versions = version_numbers(table.dataset)
        dropped = [version for version in versions[: -(keep or self._settings.keep_versions)] if version not in needed and version < before]
        if dropped:
            table.dataset.cleanup_old_versions(versions=dropped, error_if_tagged_old_versions=False)
        crashpoint("upkeep.after_cleanup")
        return len(dropped)

    def _alarms(self, table: LogTable) -> list[Alarm]:
        alarms = []
        sizes = self._core.home.sizes(table.name)
        manifests = sum(size for name, size in sizes.items() if name.startswith(("_versions/", "_transactions/")))
        data = sum(size for name, size in sizes.items() if name.startswith("data/"))
        if data > (1 << 24) and manifests > self._settings.max_manifest_share * data:
            alarms.append(Alarm(table=table.name, what="manifest share", value=manifests / data, limit=self._settings.max_manifest_share))
        live = table.num_fragments
        if live >= 1000:
            alarms.append(Alarm(table=table.name, what="live fragments", value=live, limit=1000))
        return alarms


def version_numbers(dataset: lance.LanceDataset) -> list[int]:
    """Versions that exist, oldest first, from the names of the manifests."""
    return sorted(int(reference["version"]) for reference in dataset.version_refs())


def _without_version_lists(result: RewriteResult) -> RewriteResult:
    """Lance would write two run lengths per merged version into every later manifest; nothing here reads them, lsn says more."""
    fields = orjson.loads(result.json())
    for fragment in fields["new_fragments"]:
        fragment["created_at_version_meta"] = None
        fragment["last_updated_at_version_meta"] = None
    return RewriteResult.from_json(orjson.dumps(fields).decode())


def sweep(core: LogCore, *, older_than_s: float) -> int:
    """Delete data files that no version names and that are older than that: leftovers of groups that never happened. Local stores only."""
    swept = 0
    for table in core.tables.values():
        root = core.home.local_path(table.name)
        if root is None or not (root / "data").is_dir():
            continue
        named = referenced_files(table)
        limit = time.time() - older_than_s
        for path in (root / "data").iterdir():
            if path.name.removesuffix(".lance") in named or path.stat().st_mtime > limit:
                continue
            if path.is_dir():
                for blob in path.iterdir():
                    os.unlink(blob)
                path.rmdir()
            else:
                path.unlink()
            swept += 1
    return swept


def referenced_files(table: LogTable) -> set[str]:
    """Stems of the data files that any version names."""
    named: set[str] = set()
    for version in version_numbers(table.dataset):
        for fragment in table.dataset.checkout_version(version).get_fragments():
            named.update(file.path.removesuffix(".lance") for file in fragment.metadata.files)
    return named
