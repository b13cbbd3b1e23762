"""How many prompt groups may be dispatched now, so that none can be older than the bound when it trains."""

from __future__ import annotations


def capacity(*, max_lag: int, groups_per_version: int, num_consumed: int, num_running: int) -> int:
    """Groups that may be dispatched now.

    A group dispatched now trains after all that run or wait before it, groups_per_version of them under each version. With at most
    (max_lag + 1) * groups_per_version groups consumed by this version or running, it trains max_lag versions later at the latest.
    0 lag is strictly on-policy. Dropped groups (stale, filtered, incomplete, failed) count in neither, so others take their place.
    Source: AReaL, arXiv:2505.24298, eq. 3, counted from the beginning of the version: a version may have taken fewer or more groups
    than its share, where steps were refused or an attempt ended inside it.

    num_consumed: groups of the steps since the version began. num_running: groups dispatched and neither trained nor dropped.
    """
    return max(0, (max_lag + 1) * groups_per_version - (num_consumed + num_running))
