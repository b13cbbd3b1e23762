"""What keeps a log fast for months: few fragments, few versions, small manifests. Runs in the writer between commits.

    fragments of a table, oldest first      [ big ][ big ][ mid ][ s ][ s ] ... [ s ]     more than max_fragments?
    merged                                                [ one fragment of mid and all s ]   up to a neighbour twice the run's weight

Merging only newest runs rewrites a row about log(n) times and never holds more than one binary-copied batch in memory.
A version goes when it is neither among the newest, nor pinned, nor read by a live reader.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import lance
import orjson
from lance.optimize import Compaction, RewriteResult

from molt.errors import FencedError, LogError
from molt.log.core import LogCore
from molt.log.crash import crashpoint
from molt.log.holds import held_versions
from molt.log.table import Fence, LogTable

_MANY_ROWS = 1 << 40


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


def _weight(fragment: lance.LanceFragment) -> int:
    """Rows; bytes would need a read of sizes that compacted fragments do not carry."""
    return int(fragment.metadata.physical_rows)


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
        self._since_clean_up = dict.fromkeys(core.tables, 0)

    def run(self) -> list[Alarm]:
        """Compact and clean up what is due; the alarms of this round."""
        alarms: list[Alarm] = []
        if self._core.pending is not None:
            return alarms
        for name, table in self._core.tables.items():
            if table.num_fragments > self._settings.max_fragments:
                self.compact(table)
            if table.dataset.version - self._since_clean_up[name] >= self._settings.keep_versions:
                self._since_clean_up[name] = table.dataset.version
                self.clean_up(table)
                alarms += self._alarms(table)
        return alarms

    def compact(self, table: LogTable, *, is_full: bool = False) -> int:
        """Merge fragments; the number that went away. The content, its order and its row ids stay as they are."""
        fragments = table.dataset.get_fragments()
        count = len(fragments) if is_full else run_to_merge([_weight(fragment) for fragment in fragments], heaviest=self._heaviest(table))
        if count < 2:
            return 0
        crashpoint("upkeep.before_compact")
        fence = StepFence(table.dataset.version + 1)
        dataset = lance.LanceDataset(
            table.uri, storage_options=self._core.home.storage_options, session=self._core.home.session, commit_lock=fence
        )
        if dataset.version != table.dataset.version:
            raise FencedError(
                f"log={self._core.home.where}: table {table.name} moved to version {dataset.version}; another writer took the run"
            )
        plan = Compaction.plan(
            dataset,
            {
                "compaction_mode": "try_binary_copy",
                "target_rows_per_fragment": _MANY_ROWS,
                "max_bytes_per_file": self._settings.target_bytes * 4,
                "num_threads": 1,
                "excluded_fragment_ids": [fragment.fragment_id for fragment in fragments[: len(fragments) - count]],
            },
        )
        results = [_without_version_lists(task.execute(dataset)) for task in plan.tasks]
        crashpoint("upkeep.after_rewrite")
        if not results:
            return 0
        if self._core.store.is_synced:
            table.sync([fragment for result in results for fragment in result.new_fragments])
        try:
            Compaction.commit(dataset, results)
        except OSError as error:
            if fence.met is not None:
                raise FencedError(f"log={self._core.home.where}: table {table.name}: {error}") from error
            raise LogError(f"log={self._core.home.where}: table {table.name}: compaction failed; {error}") from error
        table.open()
        crashpoint("upkeep.after_compact")
        table.commit([], self._core.state.stamp(table.name, "carry"))
        if self._core.store.is_synced:
            table.sync([])
        return len(fragments) - len(table.dataset.get_fragments())

    def _heaviest(self, table: LogTable) -> int:
        """Rows of a fragment of target_bytes, from the sizes of the newest fragments that carry one."""
        rows = size = 0
        for fragment in table.dataset.get_fragments()[-self._settings.max_fragments :]:
            sizes = [file.file_size_bytes for file in fragment.metadata.files]
            if all(sizes):
                rows += _weight(fragment)
                size += sum(int(part or 0) for part in sizes)
        return max(2, int(self._settings.target_bytes * rows / size)) if size else _MANY_ROWS

    def clean_up(self, table: LogTable, *, keep: int | None = None) -> int:
        """Drop versions that nobody needs, and the files that only they name; the number of versions dropped."""
        crashpoint("upkeep.before_cleanup")
        needed = held_versions(self._core.home, table.name)
        versions = version_numbers(table.dataset)
        dropped = [version for version in versions[: -(keep or self._settings.keep_versions)] if version not in needed]
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
