"""Two FSDP2 ranks and one rank: the same losses, gradients and weights, within float32 summation order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from molt.learn.result import RefusalReason, StepResult
from tests.learn.tiny import make_config, make_plan, make_rank, make_rows

NUM_STEPS = 3


def _train(rank: int, num_ranks: int, folder: str, model: str, changes: dict[str, Any], broken: bool) -> None:
    """One process: three steps, then results and weights of rank 0 go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{num_ranks}", num_ranks), rank=rank, world_size=num_ranks)
    rows = make_rows(7)
    if broken:
        rows[0] = replace(rows[0], behaviour_logprobs=np.full_like(rows[0].behaviour_logprobs, np.nan))
    worker = make_rank(make_config(Path(model), **changes), rows)
    results = [worker.train(make_plan(rows, step=step, num_ranks=num_ranks, micro_batch_tokens=24)) for step in range(NUM_STEPS)]
    weights = worker.policy.full_tensors()
    if rank == 0:
        torch.save((results, weights), f"{folder}/result{num_ranks}")
    dist.destroy_process_group()


def _run(num_ranks: int, folder: Path, model: Path, *, broken: bool = False, **changes: Any) -> tuple[list[StepResult], dict[str, Any]]:
    mp.spawn(_train, (num_ranks, str(folder), str(model), changes, broken), nprocs=num_ranks)
    return torch.load(folder / f"result{num_ranks}", weights_only=False)


def test_two_ranks_equal_one_rank(model: Path, tmp_path: Path) -> None:
    one, weights_one = _run(1, tmp_path, model)
    two, weights_two = _run(2, tmp_path, model)
    for a, b in zip(one, two, strict=True):
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


def test_row_without_lineage_on_one_rank_refuses_the_step_on_both(model: Path, tmp_path: Path) -> None:
    results, _ = _run(2, tmp_path, model, broken=True)
    assert all(r.refused is not None and r.refused.reason is RefusalReason.LINEAGE for r in results)
