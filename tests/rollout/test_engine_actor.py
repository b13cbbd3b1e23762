"""An engine behind its actor: silence, death, cancellation, and a pause that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from molt.data.images import Image
from molt.errors import EngineError, RefitError
from molt.rollout.engine import EngineInfo, FinishReason, Generation, RefitReport, Sampling, WeightSource
from molt.rollout.engine_actor import EngineActor, EngineHandle
from molt.rollout.spec import EngineSpec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SPEC = EngineSpec(
    name="scripted-0", kind="embedded", model_path="m", dtype="float32", max_len=99, request_timeout_s=1.0, refit_timeout_s=5.0
)


class Scripted:
    """An engine whose calls do what their seed says: 0 answers at once, 2 works for 3 s, 3 samples nothing until it is aborted."""

    def __init__(self) -> None:
        self.num_sampled = 0
        self.aborted: dict[str, asyncio.Event] = {}
        self.begun: list[str] = []

    async def start(self) -> EngineInfo:
        return EngineInfo(name="scripted-0", kind="scripted", policy_version=0, max_len=99, vocab_size=9, weights_digest="d")

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        self.begun.append(request_id)
        reason = FinishReason.STOP
        if sampling.seed == 2:
            for _ in range(30):
                await asyncio.sleep(0.1)
                self.num_sampled += 1
        if sampling.seed == 3:
            await self.aborted.setdefault(request_id, asyncio.Event()).wait()
            reason = FinishReason.ABORT
        ids = np.zeros(1, np.int32)
        return Generation(token_ids=ids, logprobs=ids.astype(np.float32), policy_versions=ids, kv_versions=ids, finish_reason=reason)

    async def abort(self, request_id: str) -> None:
        self.aborted.setdefault(request_id, asyncio.Event()).set()

    async def pause(self, mode: str = "keep") -> int:
        return 0

    async def refit(self, source: WeightSource) -> RefitReport:
        if source.path is None:
            await asyncio.sleep(1000)
        raise RefitError(f"{source.path} is bad")

    async def resume(self) -> None:
        return

    async def weights_digest(self) -> str:
        return "d"

    async def stop(self) -> None:
        return


class ScriptedActor(EngineActor):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._engine = Scripted()

    async def was_aborted(self, request_id: str) -> bool:
        return request_id in self._engine.aborted

    async def begun(self) -> list[str]:
        return self._engine.begun

    async def held(self) -> list[str]:
        return list(self._held)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def launched(spec: EngineSpec) -> EngineHandle:
    import ray

    return EngineHandle(ray.remote(ScriptedActor).options(num_cpus=0, max_concurrency=1000).remote(spec), spec)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handle(session: None) -> AsyncIterator[EngineHandle]:
    handle = launched(SPEC)
    await handle.start()
    yield handle
    await handle.stop()


def sampling(seed: int) -> Sampling:
    return Sampling(max_new_tokens=1, seed=seed)


async def test_a_call_that_is_accepted_and_never_answered_ends_with_the_engine_named(handle: EngineHandle) -> None:
    with pytest.raises(EngineError, match=r"engine scripted-0 .* sampled nothing for vllm\.request_timeout_s=1"):
        await asyncio.wait_for(handle.generate("never", [1], sampling(3)), 10.0)


async def test_a_long_call_is_not_cut_while_tokens_come(handle: EngineHandle) -> None:
    result = await asyncio.wait_for(handle.generate("long", [1], sampling(2)), 10.0)  # three times the limit of silence
    assert result.finish_reason is FinishReason.STOP


async def test_a_cancelled_caller_aborts_its_request(handle: EngineHandle) -> None:
    calling = asyncio.create_task(handle.generate("left", [1], sampling(3)))
    await asyncio.sleep(0.3)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    for _ in range(50):
        if await handle._actor.was_aborted.remote("left"):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the engine was not told")


async def test_a_pause_that_waits_lets_calls_end_and_holds_new_ones(session: None) -> None:
    handle = launched(replace(SPEC, name="patient", request_timeout_s=60.0, refit_timeout_s=60.0))
    await handle.start()
    running = asyncio.create_task(handle.generate("running", [1], sampling(3)))
    await asyncio.sleep(0.2)
    pausing = asyncio.create_task(handle.pause("wait"))
    await asyncio.sleep(0.2)
    late = asyncio.create_task(handle.generate("late", [1], sampling(0)))
    await asyncio.sleep(0.2)
    assert not pausing.done() and not late.done()
    await handle.abort("running")
    await asyncio.wait_for(pausing, 5.0)
    assert (await running).finish_reason is FinishReason.ABORT and not late.done()
    await handle.resume()
    assert (await asyncio.wait_for(late, 5.0)).finish_reason is FinishReason.STOP
    await handle.stop()


async def test_a_call_that_is_given_up_while_a_refit_holds_it_never_begins(session: None) -> None:
    handle = launched(replace(SPEC, name="holding", request_timeout_s=60.0))
    await handle.start()
    await handle.pause("wait")
    call = asyncio.create_task(handle.generate("given up", [1], sampling(0)))
    async with asyncio.timeout(30):
        while "given up" not in await handle._actor.held.remote():
            await asyncio.sleep(0.01)
        aborted = asyncio.create_task(handle.generate("aborted", [1], sampling(0)))
        while "aborted" not in await handle._actor.held.remote():
            await asyncio.sleep(0.01)
        call.cancel()
        await handle.abort("aborted")
        assert (await aborted).finish_reason is FinishReason.ABORT  # at once, though the refit goes on
        while await handle._actor.held.remote():
            await asyncio.sleep(0.01)
    await handle.resume()
    assert (await handle.generate("wanted", [1], sampling(0))).finish_reason is FinishReason.STOP
    assert await handle._actor.begun.remote() == ["wanted"]
    await handle.stop()


async def test_calls_of_a_rollout_whose_worker_is_gone_are_cut_and_their_tokens_told(session: None) -> None:
    handle = launched(replace(SPEC, name="counting", request_timeout_s=60.0))
    await handle.start()
    await asyncio.gather(*(handle.generate(f"g/0/0/{turn}/0", [1], sampling(0)) for turn in range(2)))
    await handle.generate("g/0/1/0/0", [1], sampling(0))
    twice = [asyncio.create_task(handle.generate("g/0/0/2/0", [1], sampling(3))) for _ in range(2)]  # one that joins the other
    async with asyncio.timeout(30):
        while (await handle.health()).num_in_flight < 2:
            await asyncio.sleep(0.01)
    assert await handle.close_rollout("g/0/0") == 3  # a token of each of two turns, and of the one that was cut
    assert [call.finish_reason for call in await asyncio.gather(*twice)] == [FinishReason.ABORT] * 2
    assert (await handle.close_rollout("g/0/0"), await handle.close_rollout("g/0/1")) == (0, 1)
    await handle.stop()


async def test_an_engine_out_of_service_refuses_until_it_resumes(handle: EngineHandle) -> None:
    await handle.refuse("it missed a refit")
    with pytest.raises(EngineError, match="out of service: it missed a refit"):
        await handle.generate("refused", [1], sampling(0))
    await handle.resume()
    await handle.generate("served", [1], sampling(0))


async def test_errors_keep_their_type_on_the_way(handle: EngineHandle) -> None:
    with pytest.raises(RefitError, match="the file is bad"):
        await handle.refit(WeightSource(policy_version=1, transport="file", path="the file"))


async def test_a_refit_that_is_not_answered_ends_within_its_limit(session: None) -> None:
    handle = launched(replace(SPEC, name="slow", refit_timeout_s=0.5))
    await handle.start()
    with pytest.raises(EngineError, match=r"engine slow: refit was not answered within 0\.5 s"):
        await handle.refit(WeightSource(policy_version=1, transport="file"))
    await handle.stop()


async def test_a_dead_engine_is_told_at_once(session: None) -> None:
    handle = launched(replace(SPEC, name="doomed", request_timeout_s=100.0))
    await handle.start()
    calling = asyncio.create_task(handle.generate("x", [1], sampling(3)))
    await asyncio.sleep(0.2)
    handle.kill()
    with pytest.raises(EngineError, match="engine doomed is gone"):
        await asyncio.wait_for(calling, 20.0)
