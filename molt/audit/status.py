"""Where a run stands: attempts, steps, versions, reward, and where its tokens went."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from molt.audit.report import token_ledger
from molt.audit.views import open_audit

FACTS = """
select
    (select count(*) from attempts) as attempts,
    (select arg_max(reason, lsn) from attempt_ended where attempt = (select max(attempt) from attempts)) as ended,
    (select arg_max(error, lsn) from attempt_ended where attempt = (select max(attempt) from attempts)) as error,
    (select count(*) from counted_steps) as steps,
    (select count(*) from counted_refusals) as refused_steps,
    (select max(policy_version) from weights_refit) as policy_version,
    (select arg_max(reward_mean, step) from counted_steps) as reward_mean,
    (select count(distinct group_id) from group_dispatched where purpose = 'train') as groups_dispatched,
    (select count(*) from rollouts where purpose = 'train') as rollouts_finished,
    (select count(*) from rollout_failed where is_final) as rollouts_failed,
    (select arg_max(step, lsn) from checkpoint_saved) as checkpoint_step,
    (select arg_max(what || ' (' || who || ')', lsn) from wait_ended_badly) as last_bad_wait,
    (select max(happened_at) from events) as last_event_at,
    (select arg_max(num_steps, lsn) from attempt_started) as num_steps
"""


def run_status(run_dir: str | Path) -> dict[str, Any]:
    """The facts of a run by name; None where there is none yet."""
    with open_audit(run_dir) as connection:
        cursor = connection.execute(FACTS)
        row = cursor.fetchone()
        assert row is not None, "an aggregate without rows"
        facts = dict(zip((column[0] for column in cursor.description), row, strict=True))
        ledger = token_ledger(connection)
    last_event_at = facts.pop("last_event_at")
    facts["state"] = facts.pop("ended") or "running, or lost without a word"
    facts["seconds_since_last_event"] = None if last_event_at is None else round(time.time() - last_event_at, 1)
    for line in ledger:
        facts[f"tokens {line.fate}{f' ({line.reason})' if line.reason else ''}"] = line.n_tokens
    return {"state": facts.pop("state"), **facts}
