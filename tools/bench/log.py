"""The log against plain Lance, Parquet, Arrow IPC and numpy.memmap, as ratios in one run.

Run: python -m tools.bench.log            all parts, evidence in docs/evidence/log-bench-<part>.json
     python -m tools.bench.log --parts append,take
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from molt.log.blobs import read_blobs
from molt.log.core import LogCore, open_core
from molt.log.message import Message
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Payload, to_arrow
from molt.log.store import load_store
from molt.log.table import FORMAT
from molt.log.upkeep import Upkeep
from molt.log.verify import root_at
from molt.log.writer import LogWriter
from tools.bench.clock import quick_of, quick_times, seconds
from tools.bench.log_data import batches, segments, with_lsn
from tools.faults.evidence import keep

Figures = dict[str, Any]
NUM_ROWS = 48 * 512
"""Segments of 1,000 tokens that scan and take work on."""


def _core(folder: Path, name: str, store: str) -> LogCore:
    return open_core(folder / name, load_store(store), run="run", attempt=1)


def _rivals(folder: Path, made: list[pa.RecordBatch], tables: list[pa.Table]) -> dict[str, Callable[[int], Any]]:
    """What else could keep the rows of batch number index."""
    rows, plain = made[0].num_rows, folder / "plain.lance"
    (folder / "parquet").mkdir()
    (folder / "ipc").mkdir()
    ids = np.memmap(folder / "ids.bin", np.int32, "w+", shape=(len(made) * rows * 1000,))
    logprobs = np.memmap(folder / "logprobs.bin", np.float32, "w+", shape=ids.shape)

    def write_memmap(index: int) -> None:
        values = np.asarray(made[index]["token_ids"].values)
        start = index * len(values)
        ids[start : start + len(values)] = values
        logprobs[start : start + len(values)] = made[index]["behaviour_logprobs"].values.to_numpy(zero_copy_only=False)
        ids.flush()
        logprobs.flush()

    def write_ipc(index: int) -> None:
        with pa.ipc.new_file(str(folder / "ipc" / f"{index}.arrow"), tables[index].schema) as stream:
            stream.write_table(tables[index])

    def write_plain(index: int) -> None:
        lance.write_dataset(tables[index], plain, mode="append" if plain.exists() else "create", data_storage_version=FORMAT)

    return {
        "plain Lance": write_plain,
        "Parquet zstd": lambda index: pq.write_table(tables[index], folder / "parquet" / f"{index}.parquet", compression="zstd"),
        "Arrow IPC": write_ipc,
        "numpy.memmap": write_memmap,
    }


def bench_append(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """Rows of 1,000 tokens in batches of 512: encode and commit."""
    rounds, rows = 24, 512
    made = batches(rounds, rows)
    tables = [with_lsn(batch, index * rows) for index, batch in enumerate(made)]
    process, durable = _core(folder, "process", "process"), _core(folder, "durable", "durable")
    writers: dict[str, Callable[[int], Any]] = {
        "molt, process": lambda index: process.commit_group({"segments": [made[index]]}, {"p": (index, "")}),
        "molt, durable": lambda index: durable.commit_group({"segments": [made[index]]}, {"p": (index, "")}),
        **_rivals(folder, made, tables),
    }
    times: dict[str, list[float]] = {name: [] for name in writers}
    cpu: dict[str, list[float]] = {name: [] for name in writers}
    for index in range(rounds):
        turn = list(writers)[index % len(writers) :] + list(writers)[: index % len(writers)]  # the first one meets cold rows
        for name in turn:
            before = time.process_time()
            times[name].append(seconds(lambda name=name, index=index: writers[name](index)))
            cpu[name].append(time.process_time() - before)
    per_s = {name: rows / quick_of(taken[2:]) for name, taken in times.items()}
    places = {"plain Lance": folder / "plain.lance" / "data", "Parquet zstd": folder / "parquet", "Arrow IPC": folder / "ipc"}
    sizes = {name: sum(path.stat().st_size for path in place.iterdir()) for name, place in places.items()}
    sizes["molt"] = _data_bytes(process)
    tokens = rounds * rows * 1000
    figures = {
        "rows/s": per_s,
        "bytes a token": {name: size / tokens for name, size in sizes.items()},
        "process / plain Lance": per_s["molt, process"] / per_s["plain Lance"],
        "process / plain Lance, by CPU time": statistics.median(cpu["plain Lance"]) / statistics.median(cpu["molt, process"]),
        "process / Parquet zstd": per_s["molt, process"] / per_s["Parquet zstd"],
        "durable / process": per_s["molt, durable"] / per_s["molt, process"],
        "bytes / raw 8 bytes": sizes["molt"] / tokens / 8,
    }
    process.close()
    durable.close()
    return figures, {
        "append >= 0.9 x plain Lance": figures["process / plain Lance"] >= 0.9,
        "append >= 1.5 x Parquet zstd": figures["process / Parquet zstd"] >= 1.5,
        "durable >= 0.6 x of that": figures["durable / process"] >= 0.6,
        "<= 0.70 x raw bytes a token": figures["bytes / raw 8 bytes"] <= 0.70,
    }


def _data_bytes(core: LogCore) -> int:
    return sum(size for name, size in core.home.sizes("segments").items() if name.startswith("data/"))


def bench_commits(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """10,000 commits of one row of 1,000 tokens, with upkeep: latency, manifests, memory."""
    commits = 10_000
    made = batches(64, 1)
    core = _core(folder, "commits", "process")
    upkeep = Upkeep(core)
    latencies, stalls, shares, memory = [], [], [], []
    for index in range(commits):
        latencies.append(seconds(lambda index=index: core.commit_group({"segments": [made[index % 64]]}, {"p": (index, "")})))
        stalls.append(seconds(upkeep.run))
        if index % 1000 == 999:
            memory.append(_resident_mib())
            sizes = core.home.sizes("segments")
            data = sum(size for name, size in sizes.items() if name.startswith("data/"))
            shares.append((sum(sizes.values()) - data) / data)
    medians = [statistics.median(latencies[start : start + 1000]) * 1e3 for start in range(0, commits, 1000)]
    quick = [quick_of(latencies[start : start + 1000]) * 1e3 for start in range(0, commits, 1000)]
    total = [a + b for a, b in zip(latencies, stalls, strict=True)]
    figures = {
        "lower quartile ms by thousand": quick,
        "median ms by thousand": medians,
        "p99 ms by thousand": [float(np.quantile(latencies[start : start + 1000], 0.99)) * 1e3 for start in range(0, commits, 1000)],
        "slowest / fastest thousand, lower quartile": max(quick) / min(quick),
        "last / first thousand, median": medians[-1] / medians[0],
        "mean ms with upkeep by thousand": [statistics.mean(total[start : start + 1000]) * 1e3 for start in range(0, commits, 1000)],
        "longest upkeep ms": max(stalls) * 1e3,
        "live fragments": core.tables["segments"].num_fragments,
        "manifests / data by thousand": shares,
        "resident MiB by thousand": memory,
        "growth MiB": memory[-1] - memory[0],
    }
    core.close()
    return figures, {
        "commit latency flat within 2 x over 10,000 commits": max(quick) <= 2 * min(quick),
        "manifests <= 5 % of data after 10,000 commits": shares[-1] <= 0.05,
        "writer grows < 50 MB": figures["growth MiB"] < 50,
        "< 1,000 live fragments": figures["live fragments"] < 1000,
    }


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def bench_visible(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """From append to seen by a tail that polls all the time."""
    store = load_store("durable")
    window = store.commit.window_ms
    waits = []
    with LogWriter.open(folder / "visible", run="run", store=store) as writer:
        producer = Producer(writer, "p")
        tail = LogReader.open(folder / "visible").tail("segments", ["segment_id"])
        for number, segment in enumerate(segments(60)):
            started = time.perf_counter()
            message = producer._message([segment], [], [], [], [], False)
            writer.submit(message)
            while not len(tail.poll()):
                time.sleep(0.001)
            if number > 5:
                waits.append((time.perf_counter() - started) * 1e3)
    median = statistics.median(waits)
    return {"window ms": window, "median ms": median, "p95 ms": float(np.quantile(waits, 0.95))}, {
        "visible <= window + 30 ms": median <= window + 30
    }


def _filled(folder: Path, rows: int) -> tuple[Path, pa.Table]:
    """A compacted log of that many rows, and the same rows as one table."""
    run_dir, kept = folder / f"rows{rows}", folder / f"rows{rows}.arrow"
    if not run_dir.exists():
        made = batches(rows // 512, 512)
        core = open_core(run_dir, load_store("process"), run="run", attempt=1)
        for index, batch in enumerate(made):
            core.commit_group({"segments": [batch]}, {"p": (index, "")})
        Upkeep(core).compact(core.tables["segments"], is_full=True)
        core.close()
        whole = pa.concat_tables(with_lsn(batch, index * 512) for index, batch in enumerate(made))
        with pa.ipc.new_file(str(kept), whole.schema) as stream:
            stream.write_table(whole, max_chunksize=512)
    return run_dir, pa.ipc.open_file(pa.memory_map(str(kept))).read_all()


def bench_scan(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """Every row of a log as packed torch tensors, against an Arrow scan of the same columns."""
    import torch

    run_dir, table = _filled(folder, NUM_ROWS)
    columns = ["token_ids", "behaviour_logprobs", "spans"]
    cut = LogReader.open(run_dir).cut()

    def to_torch(verify: bool) -> None:
        for batch in cut.batches(columns=None if verify else columns, verify=verify):
            parts = batch.token_ids_T, batch.behaviour_logprobs_T, batch.is_trainable_T, batch.policy_version_T
            for part in parts:
                torch.from_numpy(part if part.flags.writeable else part.view())

    def arrow_only() -> None:
        cut.dataset("segments").to_table(columns=columns)

    def arrow_all() -> None:
        cut.dataset("segments").to_table()

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that Arrow's memory is read-only; nothing here writes to it
        taken = quick_times(
            {
                "torch": lambda: to_torch(False),
                "torch, every digest checked": lambda: to_torch(True),
                "Arrow": arrow_only,
                "Arrow, all columns": arrow_all,
            }
        )
    tokens = int(pa.compute.sum(table["n_tokens"]).as_py())
    figures = {
        "tokens/s": {name: tokens / value for name, value in taken.items()},
        "torch / Arrow": taken["Arrow"] / taken["torch"],
        "torch, every digest checked / Arrow, all columns": taken["Arrow, all columns"] / taken["torch, every digest checked"],
    }
    return figures, {"scan to packed torch >= 0.7 x Arrow-only": figures["torch / Arrow"] >= 0.7}


def bench_take(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """32 random segments: ids, log-probs, spans."""
    run_dir, table = _filled(folder, NUM_ROWS)
    columns = ["token_ids", "behaviour_logprobs", "spans"]
    parquet = folder / "take.parquet"
    pq.write_table(table, parquet, compression="zstd", row_group_size=512)
    chance = np.random.default_rng(0)
    picks = [np.sort(chance.choice(len(table), 32, replace=False)) for _ in range(8)]
    names = table["segment_id"].to_pylist()
    cut = LogReader.open(run_dir).cut()
    cut.segments(names[:1])
    mapped = table.select(columns)

    def each(work: Callable[[np.ndarray], Any]) -> Callable[[], None]:
        def run() -> None:
            for pick in picks:
                work(pick)

        return run

    taken = quick_times(
        {
            "molt": each(lambda pick: cut.segments([names[place] for place in pick], verify=False, columns=columns)),
            "molt, all columns, every digest checked": each(lambda pick: cut.segments([names[place] for place in pick])),
            "Arrow IPC, memory-mapped": each(lambda pick: mapped.take(pa.array(pick)).combine_chunks()),
        }
    )
    taken["Parquet zstd"] = statistics.median(
        seconds(lambda: pq.read_table(parquet, columns=columns).take(pa.array(picks[0]))) * 8 for _ in range(3)
    )
    figures = {
        "ms for 32": {name: value / 8 * 1e3 for name, value in taken.items()},
        "molt / memory-mapped Arrow IPC": taken["molt"] / taken["Arrow IPC, memory-mapped"],
        "Parquet / molt": taken["Parquet zstd"] / taken["molt"],
    }
    return figures, {
        "take(32) <= 1.5 x memory-mapped IPC": figures["molt / memory-mapped Arrow IPC"] <= 1.5,
        "take(32) >= 100 x faster than Parquet": figures["Parquet / molt"] >= 100,
    }


def bench_blobs(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """Blobs of 1 MiB, 16 a commit, against one raw file each."""
    size, count, rounds = 1 << 20, 16, 12
    chance = np.random.default_rng(0)
    core = _core(folder, "blobs", "process")
    raw = folder / "raw"
    raw.mkdir()
    ours, files = [], []
    for index in range(rounds):
        blobs = [Payload(kind="tensor", data=chance.bytes(size), dtype="|u1", shape=(size,)) for _ in range(count)]
        rows = to_arrow("payloads", blobs, run="run", attempt=1, producer="p", seq=index)
        ours.append(seconds(lambda rows=rows, index=index: core.commit_group({"payloads": [rows]}, {"p": (index, "")})))
        files.append(
            seconds(lambda blobs=blobs, index=index: [(raw / f"{index}-{n}").write_bytes(blob.data) for n, blob in enumerate(blobs)])
        )
    core.close()
    cut = LogReader.open(folder / "blobs").cut()
    dataset = cut.dataset("payloads")
    ids = list(range(rounds * count))
    read = quick_times(
        {
            "molt": lambda: read_blobs(dataset, ids),
            "raw": lambda: [path.read_bytes() for path in sorted(raw.iterdir())],
        },
        4,
    )
    figures = {
        "write MiB/s": {"molt": count / quick_of(ours[1:]), "raw files": count / quick_of(files[1:])},
        "read MiB/s": {"molt": rounds * count / read["molt"], "raw files": rounds * count / read["raw"]},
    }
    figures["write, molt / raw files"] = figures["write MiB/s"]["molt"] / figures["write MiB/s"]["raw files"]
    figures["read, molt / raw files"] = figures["read MiB/s"]["molt"] / figures["read MiB/s"]["raw files"]
    return figures, {
        "blobs written >= 0.8 x raw files": figures["write, molt / raw files"] >= 0.8,
        "blobs read >= 0.8 x raw files": figures["read, molt / raw files"] >= 0.8,
    }


def bench_durable(folder: Path) -> tuple[Figures, dict[str, bool]]:
    """Segments of 1,000 tokens to a durable ack, many in flight, eight a message."""
    count, per_message = 4096, 8
    made = segments(count)

    def messages(sender: Producer) -> Iterator[Message]:
        return (sender._message(made[start : start + per_message], [], [], [], [], False) for start in range(0, count, per_message))

    with LogWriter.open(folder / "durable-rows", run="run", store="durable") as writer:

        def send(ready: Iterable[Message]) -> None:
            for future in [writer.submit(message) for message in ready]:
                future.result(60)

        trusting = [Producer(writer, name, is_validating=False, max_bytes=1 << 30) for name in ("a", "b")]
        encoded = list(messages(trusting[0]))
        taken = {
            "encoded by other processes": seconds(lambda: send(encoded)),
            "one process does all": seconds(lambda: send(messages(trusting[1]))),
            "one process does all and checks every rule": seconds(lambda: send(messages(Producer(writer, "c", max_bytes=1 << 30)))),
        }
    rows = {name: count / value for name, value in taken.items()}
    return {"durable rows/s": rows, "published for a peer, rows/s": 2900}, {
        "the writer makes >= 2.9 k durable rows/s": rows["encoded by other processes"] >= 2900,
        "one process alone makes >= 2.9 k durable rows/s": rows["one process does all"] >= 2900,
    }


PARTS: dict[str, Callable[[Path], tuple[Figures, dict[str, bool]]]] = {
    "append": bench_append,
    "commits": bench_commits,
    "visible": bench_visible,
    "scan": bench_scan,
    "take": bench_take,
    "blobs": bench_blobs,
    "durable": bench_durable,
}


def main() -> None:
    """Run the parts and keep the evidence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    chosen = parser.parse_args().parts.split(",")
    folder = Path(tempfile.mkdtemp())
    try:
        for name in chosen:
            figures, claims = PARTS[name](folder)
            print(name, figures, claims, flush=True)
            run_dir = max((path.parent for path in folder.glob("*/log")), key=lambda path: path.stat().st_mtime)
            print(keep(f"log-bench-{name}", {**figures, "log digest": root_at(LogReader.open(run_dir).cut())}, claims=claims))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
