"""How many prompt groups may be dispatched now, so that none can be older than the bound when it trains."""

from __future__ import annotations


def capacity(*, max_lag: int, policy_version: int, groups_per_version: int, num_consumed: int, num_running: int) -> int:
    """Groups that may be dispatched now.

    A group dispatched now trains after all that run or wait before it. With at most (max_lag + version + 1) * groups_per_version
    groups ever consumed or running, it trains at version + max_lag at the latest. 0 lag is strictly on-policy.
    Dropped groups (stale, filtered, incomplete, failed) count in neither, so others take their place.
    Source: AReaL, arXiv:2505.24298, eq. 3.

    num_consumed: groups trained so far. num_running: groups dispatched and neither trained nor dropped.
    """
    return max(0, (max_lag + policy_version + 1) * groups_per_version - (num_consumed + num_running))
