"""What a vLLM engine counts of itself: preemptions, prompt tokens taken from the prefix cache, drafts proposed and accepted.

Counting costs vLLM a little for every output, so an engine counts only when it was made with is_counted=True.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Sums since start; they only grow."""

    num_preemptions: int = 0
    """Requests that lost their cache and were computed again."""
    n_prefix_asked: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    n_prefix_found: int = 0
    n_drafted: int = 0
    """Tokens that the draft head proposed."""
    n_accepted: int = 0
    """Of these, tokens that became output."""

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None without drafts."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    def take(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Add what vLLM says of one step; either may be absent."""
        if iteration_stats is not None:
            self.num_preemptions += int(iteration_stats.num_preempted_reqs)
        if scheduler_stats is None:
            return
        if (prefix := scheduler_stats.prefix_cache_stats) is not None:
            self.n_prefix_asked += int(prefix.queries)
            self.n_prefix_found += int(prefix.hits)
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            self.n_drafted += int(drafts.num_draft_tokens)
            self.n_accepted += int(drafts.num_accepted_tokens)


def stat_logger(counts: EngineCounts) -> Any:
    """What AsyncLLM takes as a maker of stat loggers; all of them add to the same counts."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
            counts.take(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Counter
