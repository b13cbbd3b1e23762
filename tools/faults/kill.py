"""kill -9 of writer, producer and reader, at named crash points and at random times, under compaction and clean-up.

    writer    a process that only writes; producers in the parent outlive it and send again what was not acknowledged
    producer  a process that appends one stream; its successor reads from the log where it stopped
    reader    a process that tails segments and appends consumption rows with its cursor in the same commit; so does its successor

After each campaign the whole log is read: 0 lost, 0 doubled, 0 reordered. Run: python -m tools.faults.kill --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from molt.log.core import existing_core
from molt.log.crash import POINTS
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Consumption
from molt.log.store import Store, load_store
from molt.log.verify import verify_log
from tools.faults.evidence import keep
from tools.faults.rows import blob, fact, segment
from tools.faults.spawn import Victim, in_child
from tools.faults.wire import WireSink, serve

WRITER_POINTS = tuple(point for point in POINTS if point.startswith(("writer.", "upkeep.", "open.")))
PRODUCER_POINTS = ("producer.before_send", "producer.after_ack")
READER_POINTS = ("reader.after_poll", "producer.before_send", "producer.after_ack")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One campaign."""

    role: str
    kills: int = 0
    by_point: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    unsound: int = 0
    """Findings of a full verification."""
    recovery_s_median: float = 0.0
    recovery_s_max: float = 0.0
    compactions_and_clean_ups_ran: bool = False

    @property
    def is_clean(self) -> bool:
        """True when nothing was lost, doubled, reordered or unsound."""
        return not (self.lost or self.doubled or self.reordered or self.unsound)


def busy_store() -> Store:
    """The durable profile with so tight bounds that upkeep runs all the time."""
    store = load_store("durable")
    return store.model_copy(
        update={
            "commit": store.commit.model_copy(update={"window_ms": 2.0}),
            "upkeep": store.upkeep.model_copy(update={"max_fragments": 6, "keep_versions": 4, "grace_s": 0.0}),
        }
    )


class Stream:
    """One producer in the parent that appends as fast as it is acknowledged."""

    def __init__(self, sink: WireSink, number: int) -> None:
        self.number = number
        self.acked = 0
        self.sent = 0
        self._stop = threading.Event()
        self._producer = Producer(sink, f"stream{number}", num_tries=100_000, resend_s=10.0, is_validating=False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            number = self.sent
            self.sent += 1
            self._producer.append_sync(
                segments=[segment(self.number, number)], events=[fact(self.number, number)], payloads=[blob(self.number, number)]
            )
            self.acked += 1

    def stop(self) -> None:
        """Wait for the ack of what was sent."""
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), f"stream {self.number} hangs at {self.acked}"


def _schedule(kills: int, points: tuple[str, ...], seed: int) -> Iterator[tuple[str | None, float]]:
    """Half at crash points in turn, half at random times: (crash point or None, seconds to live)."""
    chance = random.Random(seed)
    for number in range(kills):
        if number % 2:
            yield None, chance.uniform(0.05, 1.0)
        else:
            point = points[(number // 2) % len(points)]
            yield f"{point}@{1 if point.startswith('open.') else chance.randint(1, 3)}", 8.0


def _end(victim: Victim, point: str | None, life_s: float, outcome: Outcome) -> None:
    """Let it live until it dies at its point or is killed."""
    died = victim.wait(life_s)
    if not died:
        victim.kill()
    name = (point or "random time").partition("@")[0]
    if point is not None and not (died and victim.was_killed):
        name = "random time"
    outcome.kills += 1
    outcome.by_point[name] = outcome.by_point.get(name, 0) + 1


PREFILLED = 9
"""Stream of the rows that are there before the first kill."""


def prefill(run_dir: str, rollouts: int) -> None:
    """A log of that many rollouts, so that recovery is measured on a long one."""
    from molt.log.writer import LogWriter

    with LogWriter.open(run_dir, run="run", store=load_store("process")) as writer:
        producer = Producer(writer, f"stream{PREFILLED}", is_validating=False)
        for start in range(0, rollouts, 512):
            producer.append_sync(segments=[segment(PREFILLED, number) for number in range(start, min(start + 512, rollouts))])


def kill_writers(run_dir: str, kills: int, seed: int) -> Outcome:
    """Kill the writer again and again; three producers outlive it."""
    outcome = Outcome(role="writer")
    address = f"{run_dir}.sock"
    sink = WireSink(address)
    recoveries: list[float] = []
    streams: list[Stream] = []
    for point, life_s in _schedule(kills, WRITER_POINTS, seed):
        started = time.monotonic()
        victim = Victim(serve, address, run_dir, busy_store(), crashpoint=point)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            _connect(sink, victim)
            recoveries.append(time.monotonic() - started)
        streams = streams or [Stream(sink, number) for number in range(3)]
        _end(victim, point, life_s, outcome)
    victim = Victim(serve, address, run_dir, busy_store())
    sink.connect()
    for stream in streams:
        stream.stop()
    sink.close()
    assert victim.wait(60), "the last writer does not end"
    outcome.recovery_s_median, outcome.recovery_s_max = statistics.median(recoveries), max(recoveries)
    outcome.messages = sum(stream.sent for stream in streams)
    return in_child(judge, outcome, run_dir, {stream.number: stream.sent for stream in streams})  # every message was acknowledged


def _connect(sink: WireSink, victim: Victim) -> None:
    while not victim.is_dead:
        try:
            sink.connect(limit_s=0.05)
            return
        except (FileNotFoundError, ConnectionRefusedError):
            continue
    raise FileNotFoundError("it died before it listened")


def judge(outcome: Outcome, run_dir: str, sent: dict[int, int]) -> Outcome:
    """Read the whole log and count what is wrong."""
    report = verify_log(run_dir)
    outcome.unsound = len(report.findings)
    cut = LogReader.open(run_dir).cut()
    rows = cut.table("segments", ["epoch", "prompt_index"])
    seen: dict[int, list[int]] = {}
    for stream, number in zip(rows["epoch"].to_pylist(), rows["prompt_index"].to_pylist(), strict=True):
        seen.setdefault(stream, []).append(number)
    for stream, count in sent.items():
        numbers = seen.get(stream, [])
        outcome.lost += len(set(range(count)) - set(numbers))
        outcome.doubled += len(numbers) - len(set(numbers))
        outcome.reordered += sum(1 for a, b in itertools.pairwise(numbers) if b < a)
    facts = cut.table("events", ["kind"], where="kind = 'step_refused'").num_rows
    expected = sum(count for stream, count in sent.items() if stream != PREFILLED)
    outcome.lost += max(0, expected - facts)
    outcome.doubled += max(0, facts - expected)
    outcome.compactions_and_clean_ups_ran = cut.versions["segments"] > 3 * len(os.listdir(f"{run_dir}/log/segments.lance/_versions"))
    return outcome


def append_stream(address: str, run_dir: str, stream: int) -> None:
    """A producer that goes on where the log says its stream ended."""
    sink = WireSink(address)
    sink.connect()
    rows = LogReader.open(run_dir).cut().table("segments", ["prompt_index"], where=f"epoch = {stream}")
    number = max(rows["prompt_index"].to_pylist(), default=-1) + 1
    producer = Producer(sink, f"stream{stream}", is_validating=False)
    while True:
        producer.append_sync(segments=[segment(stream, number)], events=[fact(stream, number)], payloads=[blob(stream, number)])
        number += 1


def consume(address: str, run_dir: str) -> None:
    """A reader that takes in each segment once: the cursor travels with the consumed rows."""
    sink = WireSink(address)
    sink.connect()
    reader = LogReader.open(run_dir)
    done = reader.cut().table("consumption", ["cursor", "step"])
    cursor, step = max(done["cursor"].to_pylist(), default=-1), max(done["step"].to_pylist(), default=-1) + 1
    tail = reader.tail("segments", ["lsn", "segment_id", "rollout_id", "group_id"], after=cursor)
    producer = Producer(sink, "trainer", is_validating=False)
    while True:
        fresh = tail.poll()
        if not len(fresh):
            time.sleep(0.002)
            continue
        reader.cut().segments(fresh["segment_id"].to_pylist()[:8])
        producer.append_sync(consumption=[_consumed(row, step, tail.after) for row in fresh.to_pylist()])
        step += 1


def _consumed(row: dict[str, str], step: int, cursor: int) -> Consumption:
    return Consumption(
        step=step,
        segment_id=row["segment_id"],
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        policy_version=0,
        rank=0,
        micro_batch=0,
        position=0,
        n_sampled=1,
        n_kept=1,
        lag=0,
        cursor=cursor,
    )


def serve_many(addresses: list[str], run_dir: str) -> None:
    """A writer that answers one client after the other at each address; a client that is gone has left nothing half done."""
    from multiprocessing.connection import Listener

    from molt.log.writer import LogWriter
    from tools.faults.wire import answer_client

    with LogWriter.open(run_dir, run="run", store=busy_store()) as writer:

        def attend(address: str) -> None:
            with Listener(address) as listener:
                while True:
                    answer_client(writer, listener.accept())

        threads = [threading.Thread(target=attend, args=(address,), daemon=True) for address in addresses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def kill_clients(run_dir: str, kills: int, seed: int, *, role: str) -> Outcome:
    """Kill producer or reader again and again beside a writer that lives."""
    outcome = Outcome(role=role)
    addresses = [f"{run_dir}.{name}.sock" for name in ("victim", "other")]
    writer = Victim(serve_many, addresses, run_dir)
    _await_socket(addresses[0], writer)
    feeder = Victim(append_stream, addresses[1], run_dir, 1)
    points = PRODUCER_POINTS if role == "producer" else READER_POINTS
    recoveries = []
    for point, life_s in _schedule(kills, points, seed):
        started = time.monotonic()
        work = (append_stream, addresses[0], run_dir, 0) if role == "producer" else (consume, addresses[0], run_dir)
        victim = Victim(*work, crashpoint=point)
        recoveries.append(time.monotonic() - started)
        _end(victim, point, min(life_s, 4.0) + 0.1, outcome)
        time.sleep(0.02)
    feeder.kill()
    time.sleep(0.3)
    writer.kill()
    outcome.recovery_s_median, outcome.recovery_s_max = statistics.median(recoveries), max(recoveries)
    return in_child(judge_clients, outcome, run_dir)


def _await_socket(address: str, writer: Victim) -> None:
    until = time.monotonic() + 60
    while not Path(address).exists():
        assert not writer.is_dead and time.monotonic() < until, "the writer does not listen"
        time.sleep(0.01)


def judge_clients(outcome: Outcome, run_dir: str) -> Outcome:
    """Each stream is 0, 1, 2 ... once; each consumed segment once, in order, none left out."""
    with existing_core(run_dir):
        pass
    cut = LogReader.open(run_dir).cut()
    rows = cut.table("segments", ["epoch", "prompt_index", "lsn", "segment_id"])
    sent: dict[int, int] = {}
    for stream, number in zip(rows["epoch"].to_pylist(), rows["prompt_index"].to_pylist(), strict=True):
        sent[stream] = max(sent.get(stream, 0), number + 1)
    outcome.messages = sum(sent.values())
    judge(outcome, run_dir, sent)
    consumed = cut.table("consumption", ["segment_id", "cursor", "lsn"])
    taken = consumed["segment_id"].to_pylist()
    outcome.doubled += len(taken) - len(set(taken))
    cursor = max(consumed["cursor"].to_pylist(), default=-1)
    due = [name for name, lsn in zip(rows["segment_id"].to_pylist(), rows["lsn"].to_pylist(), strict=True) if lsn <= cursor]
    outcome.lost += len(set(due) - set(taken))
    outcome.reordered += sum(1 for a, b in zip(due, taken, strict=False) if a != b)
    return outcome


def main() -> None:
    """Run the campaigns and keep the evidence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=0, help="rollouts in the log before the first kill")
    parser.add_argument("--roles", default="writer,producer,reader")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for role in chosen.roles.split(","):
            run_dir = f"{folder}/{role}"
            if chosen.rollouts:
                in_child(prefill, run_dir, chosen.rollouts)
            outcome = kill_writers(run_dir, chosen.kills, chosen.seed) if role == "writer" else None
            outcome = outcome or kill_clients(run_dir, chosen.kills, chosen.seed, role=role)
            print(outcome, flush=True)
            claims = {
                "0 lost, 0 doubled, 0 reordered, every row under its digest": outcome.is_clean,
                "at least 200 kills": outcome.kills >= 200,
                "recovery under 2 s": outcome.recovery_s_max < 2.0,
            }
            figures = {"rollouts before the first kill": chosen.rollouts, **asdict(outcome)}
            print(keep(f"log-faults-kill-{role}", figures, claims=claims))


if __name__ == "__main__":
    main()
