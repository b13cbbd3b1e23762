"""What grows with a cluster and runs in one process: planning, admission and digests, in seconds of processor time for each size.

Run: python -m tools.bench.scale     evidence in docs/evidence/scale-units.json; docs/scale.md reckons with it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from molt.admission.decide import AdmissionRule
from molt.admission.inbox import Inbox
from molt.admission.plan import SegmentRow, plan_from_json, plan_step, plan_to_json
from molt.rollout.weights import digest_tensors
from tools.faults.evidence import keep

SIZES = {64: 1024, 256: 4096, 1024: 16384}
"""GPUs, and rollouts of one step: half of the GPUs train, 32 rollouts on each."""
GROUP = 8
NUM_DIGEST_BYTES = 1 << 28


def main() -> None:
    """Measure all and keep it."""
    figures: dict[str, Any] = {f"{gpus} GPUs": _size(gpus, count) for gpus, count in SIZES.items()}
    figures["digest GB/s of one thread"] = _digest_rate()
    largest = figures[f"{max(SIZES)} GPUs"]
    claims = {
        "a step of 16,384 rollouts over 512 shards is planned in < 2 s": largest["plan s"] < 2.0,
        "its groups are admitted in < 2 s": largest["admission s"] < 2.0,
    }
    print(keep("scale-units", figures, claims=claims).read_text())


def _size(gpus: int, count: int) -> dict[str, float]:
    """One step of a cluster."""
    rows, ranks = _rows(count), gpus // 2

    def planned() -> str:
        plan = plan_step(rows, step=0, policy_version=0, seed=0, num_ranks=ranks, micro_batch_tokens=32768, cursor=count)
        return plan_to_json(plan)

    plan_s, text = _processor(planned)
    read_s, _ = _processor(lambda: plan_from_json(text))
    admission_s, admitted = _processor(lambda: _admit(rows))
    assert admitted == count, "every group is admitted"
    return {
        "rollouts": count,
        "shards": ranks,
        "plan s": plan_s,
        "plan read s": read_s,
        "plan MB": len(text) / 1e6,
        "admission s": admission_s,
    }


def _rows(count: int) -> list[SegmentRow]:
    """Rollouts of one segment each, of 200 to 32,000 tokens."""
    chance = np.random.default_rng(0)
    lengths = chance.integers(200, 32_000, count).tolist()
    return [
        SegmentRow(
            segment_id=f"e0-p{n // GROUP}/{n % GROUP}/1/0",
            rollout_id=f"e0-p{n // GROUP}/{n % GROUP}/1",
            group_id=f"e0-p{n // GROUP}",
            prompt_index=n // GROUP,
            lsn=n,
            n_tokens=length,
            n_sampled=length // 2,
            version_min=0,
            version_max=0,
            reward=float(n % 2),
            outcome=None,
            is_truncated=False,
        )
        for n, length in enumerate(lengths)
    ]


def _admit(rows: list[SegmentRow]) -> int:
    """Rows come in one at a time, are decided as they come, and are picked at the end; the number picked."""
    inbox = Inbox(rule=AdmissionRule(group_size=GROUP, max_lag=1, drop_incomplete=True, filter_range=None))
    for row in rows[::GROUP]:
        inbox.dispatch(row.group_id)
    for at in range(0, len(rows), GROUP):
        inbox.take_in(rows[at : at + GROUP])
        inbox.decide(0)
    segments, _ = inbox.pick(len(rows) // GROUP, 0)
    return len(segments)


def _digest_rate() -> float:
    """GB of weights a second in one thread of the CPU, the second time that they are looked at."""
    tensors = {"weight": torch.empty(NUM_DIGEST_BYTES, dtype=torch.uint8)}
    torch.set_num_threads(1)
    digest_tensors(tensors)
    seconds, _ = _processor(lambda: digest_tensors(tensors))
    return NUM_DIGEST_BYTES / 1e9 / seconds


def _processor(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of one call, and what it gave."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


if __name__ == "__main__":
    main()
