"""Two FSDP2 ranks and one rank: the same losses, gradients and weights, within float32 summation order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from molt.learn.result import RefusalReason, StepResult
from tests.groups import leave_group
from tests.learn.tiny import make_config, make_plan, make_rank, make_rows

NUM_STEPS = 3
WHOLE: dict[str, dict[str, bool]] = {
    "sharded": {},
    "weights": {"reshard_after_forward": False},
    "gradients": {"defer_grad_sync": True},
    "both": {"reshard_after_forward": False, "defer_grad_sync": True},
}
"""What is held whole through the micro-batches of a step."""
Outcome = tuple[list[StepResult], dict[str, torch.Tensor]]


def train(model: Path, num_ranks: int, *, is_broken: bool = False) -> Outcome:
    """Three steps in this process group; is_broken: the first row has no log-probs."""
    rows = make_rows(7)
    if is_broken:
        rows[0] = replace(rows[0], behaviour_logprobs=np.full_like(rows[0].behaviour_logprobs, np.nan))
    worker = make_rank(make_config(model), rows)
    results = [worker.train(make_plan(rows, step=step, num_ranks=num_ranks, micro_batch_tokens=24)) for step in range(NUM_STEPS)]
    return results, worker.policy.full_tensors()


class Collectives(TorchDispatchMode):
    """Counts what FSDP gathers and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"_allgather_base_.default": 0, "_reduce_scatter_base_.default": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in self.counts:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(model: Path, fsdp: dict[str, bool]) -> tuple[list[int], list[float]]:
    """Gathers and sums of a second step of three micro-batches, and its loss, gradient norm and the first one's."""
    rows = make_rows(7)
    worker = make_rank(make_config(model, fsdp=fsdp), rows)
    plans = [make_plan(rows, step=step, num_ranks=2, micro_batch_tokens=24) for step in range(2)]
    assert len(plans[1].micro_batches[0]) == 3
    first = worker.train(plans[0])
    with Collectives() as collectives:
        second = worker.train(plans[1])
    return list(collectives.counts.values()), [second.loss, second.grad_norm, first.grad_norm]


def _process(rank: int, folder: str, model: str) -> None:
    """One of two processes; rank 0 writes what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = [train(Path(model), 2, is_broken=is_broken) for is_broken in (False, True)]
    wholes = {name: counted(Path(model), fsdp) for name, fsdp in WHOLE.items()}
    if rank == 0:
        torch.save(found, f"{folder}/found")
        torch.save(wholes, f"{folder}/wholes")
    leave_group()


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks wrote what they made."""
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(_process, (str(folder), str(model)), nprocs=2)
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Outcome]:
    """What two ranks made of sound rows, and of a broken one."""
    return torch.load(folder / "found", weights_only=False)


def test_two_ranks_equal_one_rank(model: Path, two: list[Outcome]) -> None:
    one, weights_one = train(model, 1)
    results, weights_two = two[0]
    for a, b in zip(one, results, strict=True):
        assert a.batch_digest == b.batch_digest  # same ids, masks and advantages, bit for bit
        # The loss is a sum of about 50 float32 terms of size 1e-2 in another order: 1e-6 is a hundred roundings.
        assert abs(a.loss - b.loss) < 1e-6
        assert abs(a.grad_norm - b.grad_norm) < 1e-5 * a.grad_norm
        assert a.n_kept == b.n_kept and len(a.uses) == len(b.uses) == 7
    # AdamW divides by the root of the second moment, so where a gradient is all rounding noise (about 1e-9) its sign decides a
    # whole step of the learning rate, 1e-2. Such weights are few; the others agree to 1e-5.
    gaps = torch.cat([(weights_one[name] - weights_two[name]).abs().flatten() for name in weights_one])
    assert float(gaps.median()) < 1e-6
    assert float((gaps > 1e-5).float().mean()) < 0.01
    assert float(gaps.max()) <= 2 * NUM_STEPS * 1e-2


def test_row_without_lineage_on_one_rank_refuses_the_step_on_both(two: list[Outcome]) -> None:
    results, _ = two[1]
    assert all(r.refused is not None and r.refused.reason is RefusalReason.LINEAGE for r in results)


def test_weights_and_gradients_held_whole_are_gathered_and_summed_once_a_step(folder: Path) -> None:
    wholes = torch.load(folder / "wholes", weights_only=True)
    # Three groups (two blocks and the rest), three micro-batches. Sharded: each group is gathered for each forward pass, each block again
    # for each backward pass (the rest stays between the two): 9 + 6; sums of 3 groups after each of 3 micro-batches.
    assert {name: counts for name, (counts, _) in wholes.items()} == {
        "sharded": [15, 9],
        "weights": [3, 9],
        "gradients": [15, 3],
        "both": [3, 3],
    }
    for _, figures in wholes.values():
        assert figures == pytest.approx(wholes["sharded"][1], rel=1e-5)
