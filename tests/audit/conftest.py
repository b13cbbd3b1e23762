"""A log of literal rows in DuckDB: the five tables from the schemas, rows through the log's own encoders, the views on top."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pytest

from molt.admission.recover import SEGMENT_COLUMNS
from molt.audit.questions import ask_question, load_questions
from molt.audit.views import add_views
from molt.config import Config
from molt.log.rows import Consumption, Score, Segment, Span, TokenSource, event, to_arrow
from molt.schema import arrow_schema, event_kinds, tables

EMPTY = {"VARCHAR": "", "INTEGER": 0, "BIGINT": 0, "DOUBLE": 0.0, "BOOLEAN": False, "VARCHAR[]": [], "INTEGER[]": []}
P, U = TokenSource.POLICY, TokenSource.USER


class LiteralLog:
    """Rows take their lsn from the order in which they are added."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection
        for name in tables():
            connection.execute(f"delete from {name}")
        self.lsn = 0
        self.attempt = 1

    def add(self, table: str, row: Any, **replaced: Any) -> None:
        """Append one row; replaced columns are written over what the encoder made, to break a rule on purpose."""
        batch = to_arrow(table, [row], run="r", attempt=self.attempt, producer="test", seq=self.lsn)
        values = {**batch.to_pylist()[0], "lsn": self.lsn, **replaced}
        names = arrow_schema(table).names
        marks = ", ".join("?" for _ in names)
        self.connection.execute(f"insert into {table} values ({marks})", [values[name] for name in names])
        self.lsn += 1

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event; a column that must not be null and is not given gets an empty value of its type."""
        for column in event_kinds()[kind].columns:
            if not column.is_nullable and column.name not in fields:
                fields[column.name] = EMPTY[column.sql_type]
        self.add("events", event(kind, **fields))

    def start(self, attempt: int = 1, resumed_from_step: int | None = None, max_lag: int = 1, **algo: Any) -> None:
        """An attempt starts, with max_lag and settings of algo.advantage as given."""
        self.attempt = attempt
        config = Config().model_dump(mode="json")
        config["admission"]["max_lag"] = max_lag
        config["algo"]["advantage"].update(algo)
        self.event("attempt_started", config=json.dumps(config), resumed_from_step=resumed_from_step)

    def dispatch(self, group_id: str = "e0-p0", order_index: int = 0, group_size: int = 1, purpose: str = "train") -> None:
        """A group is sent to rollout."""
        self.event(
            "group_dispatched",
            group_id=group_id,
            epoch=0,
            order_index=order_index,
            prompt_index=order_index,
            prompt_id="p",
            group_size=group_size,
            members=list(range(group_size)),
            purpose=purpose,
        )

    def segment(
        self, rollout_id: str = "e0-p0/0/0", *, versions: tuple[int, ...] = (0,), replaced: dict[str, Any] | None = None, **fields: Any
    ) -> str:
        """A segment of two user tokens, then two sampled tokens for each version, log-prob -0.5 each; returns its id."""
        spans = [Span(len=2, source=U)]
        spans += [Span(len=2, source=P, trainable=True, policy_version=version, kv_version=version) for version in versions]
        logprobs = [np.nan] * 2 + [-0.5] * (2 * len(versions))
        group_id, member, _ = rollout_id.split("/")
        row = Segment(
            **{
                "rollout_id": rollout_id,
                "group_id": group_id,
                "segment_index": 0,
                "num_segments": 1,
                "member": int(member),
                "group_size": 1,
                "prompt_id": "p",
                "prompt_index": int(group_id.partition("-p")[2] or 0),
                "epoch": 0,
                "token_ids": np.arange(len(logprobs), dtype=np.int32),
                "behaviour_logprobs": np.array(logprobs, np.float32),
                "spans": spans,
                "reward": 1.0,
                "is_terminated": True,
                "is_truncated": False,
                "stop_reason": "terminated",
                "temperature": 1.0,
                "engine": "embedded-0",
                "tokenizer_digest": "t",
                "template_digest": "t",
                "started_at": 0.0,
                "finished_at": 1.0,
                **fields,
            }
        )
        self.add("segments", row, **(replaced or {}))
        return row.segment_id

    def plan(self, step: int, segment_ids: list[str], *, policy_version: int | None = None, n_sampled: int | None = None) -> None:
        """A plan of one rank and one micro-batch with the segments in order, each as its row says."""
        groups = sorted({segment_id.split("/")[0] for segment_id in segment_ids})
        rows = [
            dict(zip(SEGMENT_COLUMNS, row, strict=True))
            for segment_id in segment_ids
            for row in self.sql(f"select {', '.join(SEGMENT_COLUMNS)} from segments where segment_id = '{segment_id}' limit 1")
        ]
        figures = {
            "step": step,
            "policy_version": step if policy_version is None else policy_version,
            "seed": 0,
            "cursor": self.lsn - 1,
            "n_sampled": 2 * len(segment_ids) if n_sampled is None else n_sampled,
            "num_rollouts": len(segment_ids),
        }
        plan = {"segments": rows, "micro_batches": [[list(range(len(segment_ids)))]], "num_groups": len(groups), **figures}
        self.event(
            "batch_planned", plan=json.dumps(plan), plan_digest=f"plan{step}", groups=groups, num_segments=len(segment_ids), **figures
        )

    def score(
        self, segment_id: str, step: int, *, trainer: tuple[float, ...] = (-0.5, -0.5), weights: tuple[float, ...] | None = None
    ) -> None:
        """What the trainer computed for a segment; weights are 1 unless given."""
        row = Score(
            step=step,
            policy_version=step,
            segment_id=segment_id,
            rank=0,
            trainer_logprobs=np.array(trainer, np.float32),
            advantages=np.ones(len(trainer), np.float32),
            gate_weights=np.array(weights if weights is not None else [1.0] * len(trainer), np.float32),
        )
        self.add("scores", row)

    def gate(
        self,
        segment_id: str,
        step: int,
        *,
        n_tokens: int = 2,
        n_kept: int = 2,
        level: str = "off",
        mode: str = "mask",
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        """A gate decision."""
        self.event(
            "gate_decided", step=step, segment_id=segment_id, level=level, mode=mode, low=low, high=high, n_tokens=n_tokens, n_kept=n_kept
        )

    def consume(self, segment_id: str, step: int, *, n_sampled: int = 2, n_kept: int = 2, lag: int | None = 0, **fields: Any) -> None:
        """A consumption row of rank 0, micro-batch 0."""
        rollout_id = segment_id.rpartition("/")[0]
        row = Consumption(
            **{
                "step": step,
                "segment_id": segment_id,
                "rollout_id": rollout_id,
                "group_id": rollout_id.split("/")[0],
                "policy_version": step,
                "rank": 0,
                "micro_batch": 0,
                "position": 0,
                "n_sampled": n_sampled,
                "n_kept": n_kept,
                "lag": lag,
                "cursor": 0,
                **fields,
            }
        )
        self.add("consumption", row)

    def trained(self, step: int, *, n_sampled: int = 2, n_kept: int = 2, batch_digest: str = "b") -> None:
        """A step was trained."""
        self.event(
            "step_trained",
            step=step,
            policy_version=step,
            loss=0.0,
            grad_norm=1.0,
            learning_rate=1e-3,
            n_sampled=n_sampled,
            n_kept=n_kept,
            reward_mean=1.0,
            batch_digest=batch_digest,
            loss_digest="l",
            metrics="{}",
            train_s=1.0,
            log_s=0.1,
            wait_s=0.2,
        )

    def decide(self, group_id: str, decision: str, *, n_sampled: int = 2) -> None:
        """Admission decided on a group."""
        self.event(
            "group_decided",
            group_id=group_id,
            decision=decision,
            reason="because",
            lag=0,
            num_rollouts=1,
            num_failed=0,
            n_sampled=n_sampled,
        )

    def fail(self, rollout_id: str, *, reason: str = "agent_error", n_sampled: int = 3, is_final: bool = True) -> None:
        """A rollout failed."""
        group_id, member, _ = rollout_id.split("/")
        self.event(
            "rollout_failed",
            rollout_id=rollout_id,
            group_id=group_id,
            member=int(member),
            reason=reason,
            error="e",
            n_sampled=n_sampled,
            num_tries=1,
            is_final=is_final,
        )

    def step(self, step: int, segment_id: str, **consumed: Any) -> None:
        """Plan, score, gate, train and consume one segment: everything that a step leaves."""
        self.plan(step, [segment_id])
        self.score(segment_id, step)
        self.gate(segment_id, step)
        self.trained(step)
        self.consume(segment_id, step, **consumed)

    def well(self) -> None:
        """A small run in order: two groups, the first trained at step 0, the second at step 1 with lag 1."""
        self.start()
        for index in (0, 1):
            self.dispatch(f"e0-p{index}", index)
        first, second = self.segment("e0-p0/0/0"), self.segment("e0-p1/0/0")
        self.decide("e0-p0", "admitted")
        self.step(0, first)
        self.decide("e0-p1", "admitted")
        self.step(1, second, lag=1)

    def rows(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Answer of a question of queries/."""
        return ask_question(self.connection, load_questions()[name], **parameters).rows

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        """Answer of SQL text."""
        return self.connection.execute(text).fetchall()


@pytest.fixture(scope="session")
def tables_and_views() -> Iterator[duckdb.DuckDBPyConnection]:
    """The five tables as plain DuckDB tables without their checks, so that a test can break a rule; the views on top."""
    with duckdb.connect(config={"threads": 1}) as connection:
        for schema in tables().values():
            columns = ", ".join(f'"{column.name}" {column.sql_type}' for column in schema.columns)
            connection.execute(f"create table {schema.name} ({columns})")
        add_views(connection)
        yield connection


@pytest.fixture
def log(tables_and_views: duckdb.DuckDBPyConnection) -> LiteralLog:
    """An empty log."""
    return LiteralLog(tables_and_views)
