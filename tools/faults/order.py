"""The order of syncs and acknowledgements, seen by strace: no ack before data, directory, manifest and directory are durable.

Run: python -m tools.faults.order
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.faults.evidence import keep

NUM_MESSAGES = 5
_CHILD = f"""
import os
from molt.log.producer import Producer
from molt.log.writer import LogWriter
from tools.faults.rows import fact, segment
import sys
with LogWriter.open(sys.argv[1], run="run", store=sys.argv[2]) as writer:
    producer = Producer(writer, "p")
    os.write(2, b"BEGIN\\n")
    for number in range({NUM_MESSAGES}):
        producer.append_sync(segments=[segment(0, number)], events=[fact(0, number)])
        os.write(2, b"ACK %d\\n" % number)
"""
STEPS = ("data file", "data directory", "manifest", "versions directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was synced between one ack and the next, for each table of the message."""

    acks: int
    in_order: int
    """Acks before which, for both tables, all four syncs were made in order."""
    syncs_per_ack: float


def trace(run_dir: str, store: str, output: str) -> list[str]:
    """Run the child under strace; its relevant calls in time order."""
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,write", "-e", "signal=none", "-o", output, sys.executable, "-c", _CHILD]
    subprocess.run([*command, run_dir, store], check=True, timeout=120, capture_output=True)
    return Path(output).read_text(errors="replace").splitlines()


def step_of(path: str) -> tuple[str, str] | None:
    """Table and step that a synced path stands for."""
    match = re.search(r"/(\w+)\.lance/(data|_versions)(/.*)?$", path)
    if match is None:
        return None
    is_file = match[3] is not None
    kind = {("data", True): STEPS[0], ("data", False): STEPS[1], ("_versions", True): STEPS[2], ("_versions", False): STEPS[3]}
    return match[1], kind[match[2], is_file]


def read_order(lines: list[str]) -> Order:
    """Check each stretch between two acks."""
    acks = in_order = syncs = 0
    seen: list[tuple[str, str]] = []
    has_begun = False
    for line in lines:
        if '"BEGIN' in line:
            has_begun, seen = True, []
        elif '"ACK' in line:
            acks += 1
            in_order += is_ordered(seen)
            seen = []
        elif has_begun and (match := re.search(r"(?:fsync|fdatasync)\(\d+<([^>]*)>", line)):
            step = step_of(match[1])
            if step is not None:
                seen.append(step)
                syncs += 1
    return Order(acks=acks, in_order=in_order, syncs_per_ack=syncs / max(acks, 1))


def is_ordered(seen: list[tuple[str, str]]) -> bool:
    """Each table: its four steps in order; and all data of all tables before the first manifest."""
    for table in ("segments", "events"):
        steps = [step for name, step in seen if name == table]
        if steps != list(STEPS):
            return False
    first_manifest = min(place for place, (_, step) in enumerate(seen) if step == STEPS[2])
    return all(place < first_manifest for place, (_, step) in enumerate(seen) if step in STEPS[:2])


def main() -> None:
    """Trace the durable and the process profile and keep the evidence."""
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed")
    with tempfile.TemporaryDirectory() as folder:
        durable = read_order(trace(f"{folder}/durable", "durable", f"{folder}/durable.txt"))
        process = read_order(trace(f"{folder}/process", "process", f"{folder}/process.txt"))
    claims = {
        "every ack of the durable profile follows data, directory, manifest, directory": durable.acks == durable.in_order == NUM_MESSAGES,
        "the process profile syncs nothing": process.syncs_per_ack == 0,
    }
    print(durable, process, keep("log-faults-order", {"durable": asdict(durable), "process": asdict(process)}, claims=claims))


if __name__ == "__main__":
    main()
