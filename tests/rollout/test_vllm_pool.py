"""vLLM engines as actors behind the pool: rollouts, refits, and processes that die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from molt.data.tiny import make_model
from molt.errors import EngineError
from molt.rollout.pool import RolloutPool
from tests.rollout.test_pool import group, new_weights, rig, settings

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


async def calls_in_flight(pool: RolloutPool, name: str) -> None:
    """Return as soon as the engine works on a call."""
    async with asyncio.timeout(60.0):
        while (await pool._fleet.berths[name].handle.health()).num_in_flight == 0:
            await asyncio.sleep(0.001)


async def tokens_in_flight(pool: RolloutPool, name: str) -> int:
    """Tokens that its calls have sampled since now, as soon as there are some."""
    handle = pool._fleet.berths[name].handle
    before = (await handle.health()).num_sampled
    async with asyncio.timeout(60.0):
        while (known := (await handle.health()).num_sampled - before) < 8:
            await asyncio.sleep(0.001)
    return known


async def test_rollouts_refits_and_deaths(session: None, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model)
    config = settings(
        tmp_path,
        model,
        vllm={"engine": "vllm", "request_timeout_s": 60.0, "refit_timeout_s": 60.0},
        rollout={"max_new_tokens": 150, "timeout_s": 200.0, "n_samples_per_prompt": 4},
        train={"partial_rollout_enable": True},
    )
    async with rig(config, tmp_path, "vllm") as r:
        await r.pool.dispatch(group(0, size=4))
        ended = await r.pool.next(LIMIT_S)
        assert len(ended.done) == 4 and {done.version_min for done in ended.done} == {0}

        # A refit in the middle of calls: they keep their tokens, later ones carry the new version.
        await r.pool.dispatch(group(1, "turns", size=4))
        await calls_in_flight(r.pool, "vllm-0")
        times = await r.pool.refit(new_weights(model, tmp_path, 1), step=0)
        ended = await r.pool.next(LIMIT_S)
        assert len(ended.done) == 4 and times.num_in_flight > 0 and not times.failed
        rows = [row for row in r.rows("segments", ["group_id", "version_min", "version_max"]) if row["group_id"] == "e0-p1"]
        assert (0, 1) in {(row["version_min"], row["version_max"]) for row in rows}

        # The core of the engine is killed in the middle of calls: a new engine with the newest weights takes over.
        actor = psutil.Process((await r.pool._fleet.berths["vllm-0"].handle.health()).pid)
        await r.pool.dispatch(group(2, "turns", size=4))
        await calls_in_flight(r.pool, "vllm-0")
        known = await tokens_in_flight(r.pool, "vllm-0")
        for child in actor.children(recursive=True):
            os.kill(child.pid, signal.SIGKILL)
        ended = await r.pool.next(LIMIT_S)
        assert len(ended.done) == 4 and {done.version_min for done in ended.done} == {1}
        assert {done.engine for done in ended.done} == {"vllm-0+1"}
        failed = r.events("rollout_failed", "e0-p2")
        assert failed and {body["reason"] for body in failed} == {"engine_error"}
        assert sum(int(str(body["n_sampled"])) for body in failed) >= known  # the actor had them, and they are lost

        # The core dies in the middle of a refit: that ends at once, and no call goes there any more.
        handle = r.pool._fleet.berths["vllm-0+1"].handle
        core = next(c for c in psutil.Process((await handle.health()).pid).children() if "EngineCore" in " ".join(c.cmdline()))
        await handle.pause("keep")
        core.suspend()
        refit = asyncio.create_task(handle.refit(new_weights(model, tmp_path, 2)))
        await asyncio.sleep(1.0)
        core.kill()
        async with asyncio.timeout(30.0):  # half of the time that a refit may take
            with pytest.raises(EngineError, match="core is gone"):
                await refit
        with pytest.raises(EngineError, match="is dead"):
            await handle.health()
        assert not await r.pool._fleet.examine("vllm-0+1")
        await r.pool.dispatch(group(3, size=4))
        assert {done.engine for done in (await r.pool.next(LIMIT_S)).done} == {"vllm-0+2"}

        # The actor itself is killed: nothing of vLLM outlives it.
        actor = psutil.Process((await r.pool._fleet.berths["vllm-0+2"].handle.health()).pid)
        children = actor.children(recursive=True)
        assert children
        actor.kill()
        ends = time.monotonic() + 20.0
        while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
            assert time.monotonic() < ends, f"{[child for child in children if child.is_running()]} outlived the engine's actor"
            await asyncio.sleep(0.2)
