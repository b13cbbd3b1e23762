"""The group of ranks under Ray over a real log: record, publish, checkpoint, replay."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from molt.errors import MoltError, ReplayMismatchError
from molt.learn.ranks import RankGroup
from molt.learn.result import RecordedStep
from molt.log.actor import RaySink, start_log_actor, stop_log_actor
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.rollout.weights import digest_tensors, model_digest
from tests.learn.tiny import make_config, make_model, make_plan, make_rows, to_segments

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:lance is not fork-safe"),  # Ray starts its daemons by fork; they do not use lance
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS = make_rows(6)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
async def log(cluster: None, tmp_path: Path) -> AsyncIterator[Any]:
    import ray

    handle = start_log_actor(tmp_path / "run", run="run", attempt=1, store="durable")
    await Producer(RaySink(handle), "test").append(segments=to_segments(ROWS))
    yield handle
    try:
        stop_log_actor(handle)
    finally:
        ray.kill(handle, no_restart=True)


@pytest.mark.parametrize("fsdp", [{"num_ranks": 1}, {"num_ranks": 2}, {"num_ranks": 2, "cp_size": 2}])
async def test_recorded_steps_replay_bit_for_bit_and_a_changed_digest_is_named(
    log: Any, model: Path, tmp_path: Path, fsdp: dict[str, int]
) -> None:
    config = make_config(model, fsdp=fsdp)
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "run": "run", "num_steps": 3}
    plans = [make_plan(ROWS, step=step, num_ranks=config.fsdp.num_shards, micro_batch_tokens=32) for step in range(3)]
    group = await RankGroup.start(config, log=log, **options)
    try:
        results = [await group.train(plan) for plan in plans]
        folder, digest = await group.save(step=3, policy_version=3, cursor=6, lsn_end=6)
        source = await group.publish_weights(3)
        sent = load_file(source.path or "")
        exported = await group.export(tmp_path / "out")
        assert await group.newest_checkpoint() == (folder, [])
    finally:
        await group.stop()
    assert [r.refused for r in results] == [None] * 3
    assert results[-1].weights_digest == digest == model_digest(source.digests) == model_digest(digest_tensors(sent))
    assert (exported / "model.safetensors").is_file()
    assert not Path(source.path or "").exists()  # shared memory is given back

    cut = LogReader.open(tmp_path / "run").cut()
    assert cut.table("scores").num_rows == 3 * len(ROWS)
    assert cut.table("events", where="kind = 'gate_decided'").num_rows == 3 * len(ROWS)

    group = await RankGroup.start(config, mode="replay", **options)
    try:
        for plan, result in zip(plans[:2], results[:2], strict=True):
            recorded = RecordedStep(batch_digest=result.batch_digest, loss_digest=result.loss_digest, weights_digest=result.weights_digest)
            assert (await group.train(plan, recorded)).loss == result.loss
        with pytest.raises(ReplayMismatchError, match="step 2: weights digest"):
            await group.train(plans[2], replace(recorded, batch_digest=results[2].batch_digest, loss_digest=results[2].loss_digest))
    finally:
        await group.stop()


async def test_replay_names_the_first_token_that_differs(log: Any, model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "run": "run", "num_steps": 3}
    group = await RankGroup.start(make_config(model), log=log, **options)
    try:
        await group.train(make_plan(ROWS))
    finally:
        await group.stop()
    other = make_config(model, algo={"advantage": {"estimator": "dr_grpo"}})
    group = await RankGroup.start(other, mode="replay", **options)
    try:
        with pytest.raises(ReplayMismatchError, match=r"step 0, segment e0-p\d/\d/1/0, sampled token 0: advantages is .*, recorded"):
            await group.train(make_plan(ROWS))
    finally:
        await group.stop()


@pytest.mark.parametrize("estimator", ["gae", "on_policy_distill"])
async def test_steps_with_models_beside_the_policy_resume_and_replay(log: Any, model: Path, tmp_path: Path, estimator: str) -> None:
    teacher = make_model(tmp_path / "teacher", seed=1)
    rooms: dict[str, Any] = {"algo": {"advantage": {"estimator": estimator}}}
    if estimator == "on_policy_distill":
        rooms["reference"] = {"model_name_or_path": str(teacher), "placement": "apart"}
    config = make_config(model, fsdp={"num_ranks": 2}, **rooms)
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "run": "run", "num_steps": 3}
    plans = [make_plan(ROWS, step=step, num_ranks=2, micro_batch_tokens=32) for step in range(3)]
    group = await RankGroup.start(config, log=log, **options)
    try:
        results = [await group.train(plans[0])]
        folder, _ = await group.save(step=1, policy_version=1, cursor=6, lsn_end=6)
        results += [await group.train(plan) for plan in plans[1:]]
        assert (await group.load(folder)).step == 1
        again = await group.train(plans[1])
    finally:
        await group.stop()
    assert all(r.refused is None for r in results)
    assert again.weights_digest == results[1].weights_digest  # a critic's state too came back
    column = "values" if estimator == "gae" else "teacher_logprobs"
    assert LogReader.open(tmp_path / "run").cut().table("scores", [column])[column].null_count == 0
    group = await RankGroup.start(config, mode="replay", **options)
    try:
        assert [(await group.train(plan)).weights_digest for plan in plans] == [r.weights_digest for r in results]
    finally:
        await group.stop()


async def test_killed_rank_ends_the_group_with_a_named_cause(log: Any, model: Path, tmp_path: Path) -> None:
    group = await RankGroup.start(make_config(model, fsdp={"num_ranks": 2}), run_dir=tmp_path / "run", run="run", log=log, num_steps=3)
    try:
        pids = await asyncio.gather(*(actor.pid.remote() for actor in group._actors))
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(MoltError, match=r"rank \d died in train .*--resume"):
            await group.train(make_plan(ROWS, num_ranks=2, micro_batch_tokens=32))
        with pytest.raises(MoltError, match=r"rank \d died in train"):
            await group.weights_digest()
    finally:
        await group.stop()
