"""Eight estimators x six gates over a made log of 1e7 sampled tokens: seconds, tokens a second, and the memory beside one batch."""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from molt.ablate.measure import Tally
from molt.ablate.record import ScoredRun
from molt.ablate.report import make_report
from molt.ablate.variants import baseline_of, parse_grid
from molt.cli.programs import load_program
from molt.config import Config
from tools.bench.made_run import make_run

ESTIMATORS = ("reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "gae", "on_policy_distill", "flash_reinforce")
GATES = ("off", "token/mask", "token/trunc", "seq/mask", "geo/mask", "tv/token/mask")
TOKENS_PER_STEP = 16 * 8 * 1000


def main() -> int:
    """Print one JSON object; leave with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--dir", type=Path, help="folder of the made run; kept and used again when given")
    given = parser.parse_args()
    where = given.dir or Path(tempfile.mkdtemp(prefix="molt-bench-")) / "run"
    num_steps = max(1, round(given.tokens / TOKENS_PER_STEP))
    try:
        if not (where / "log").is_dir():
            config = Config.model_validate({"algo": {"advantage": {"estimator": "grpo", "is_correction_level": "token"}}})
            make_run(where, config, num_steps=num_steps, groups_per_step=16, group_size=8, mean_length=1000)
        found = measure(where)
    finally:
        if given.dir is None:
            shutil.rmtree(where.parent, ignore_errors=True)
    found["is_met"] = found["seconds"] <= given.limit_s
    print(json.dumps(found, indent=2))
    return 0 if found["is_met"] else 1


def measure(where: Path) -> dict[str, float]:
    """Time of the whole ablation, reading included, and how memory grew after the first and after the last step."""
    begun = time.monotonic()
    run = ScoredRun.open(where)
    grid = parse_grid(ESTIMATORS, GATES, [], ["token-mean"])
    tally = Tally(grid=grid, config=run.config, baseline=baseline_of(grid, None), num_resamples=400, seed=0)
    peaks = []
    for found in load_program("ablate").measured(tally, run, num_threads=2):
        tally.take(found)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    report = make_report(tally, run=where.name, lsn=run.cut.lsn, skipped={})
    seconds = time.monotonic() - begun
    return {
        "num_variants": len(report.rows),
        "n_sampled": report.n_sampled,
        "num_steps": report.num_steps,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(report.n_sampled / seconds),
        "peak_mib_after_tenth": round(peaks[len(peaks) // 10], 1),
        "peak_mib_at_end": round(peaks[-1], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
