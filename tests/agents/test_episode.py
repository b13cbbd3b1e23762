"""One rollout to its end: what ends it, what it is paid, and which failures are none of the policy's."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import molt.agents as agents
from molt.agents.episode import Episode, EpisodeIds, EpisodeLimits, run_episode
from molt.agents.render import ChatRenderer
from molt.data.prompts import Prompt
from molt.errors import AgentError, AgentTimeoutError, EngineError, LineageError, PromptTooLongError
from molt.log.rows import TokenSource, to_arrow
from molt.rollout.engine import FinishReason, Sampling
from tests.agents.scripted import ScriptedEngine, generation

GO_ON = agents.Result(terminated=False, truncated=False, observation=agents.Observation.user("more"))
DONE = agents.Result(terminated=True, truncated=False, reward=1.0, outcome=1.0)


class ScriptedEnv(agents.Env):
    """Gives the results of its class in order; a callable is awaited, an exception raised."""

    script: tuple = ()
    closed = 0

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.actions: list[agents.Action] = []

    async def step(self, action: agents.Action) -> agents.Result:
        self.actions.append(action)
        said = self.script[len(self.actions) - 1]
        if isinstance(said, Exception):
            raise said
        return await said() if callable(said) else said

    async def close(self) -> None:
        type(self).closed += 1


def runner_of(*script, base: type[ScriptedEnv] = ScriptedEnv) -> agents.AgentRunner:
    env_class = type("OneEnv", (base,), {"script": script, "closed": 0})
    return type("OneRunner", (agents.AgentRunner,), {"env": env_class})()


async def run(
    runner: agents.AgentRunner,
    prompt: Prompt,
    renderer: ChatRenderer,
    *script,
    max_turns: int = 5,
    max_len: int = 200,
    timeout_s: float = 5.0,
    purpose: str = "train",
    max_new_tokens: int = 32,
) -> tuple[Episode, ScriptedEngine]:
    engine = ScriptedEngine(renderer.tokenizer, *script)
    ids = EpisodeIds(group_id="e0-p3", member=1, try_number=0, group_size=4, epoch=0, engine="engine-0", purpose=purpose)
    episode = await run_episode(
        runner,
        prompt,
        engine.generate,
        renderer,
        limits=EpisodeLimits(max_turns=max_turns, max_len=max_len, timeout_s=timeout_s),
        sampling=Sampling(max_new_tokens=max_new_tokens),
        ids=ids,
    )
    return episode, engine


async def hang() -> agents.Result:
    await asyncio.sleep(60)
    return DONE


async def test_reward_is_the_sum_of_steps_and_rows_fit_the_schema(prompt, renderer) -> None:
    half = replace(GO_ON, reward=0.25, metrics={"a": 1.0})
    runner = runner_of(half, replace(DONE, metrics={"b": 2.0}))
    episode, engine = await run(runner, prompt, renderer, "one", "two")
    assert episode.reward == 1.25 and episode.outcome == 1.0 and episode.stop_reason == "terminated"
    assert episode.metrics == {"a": 1.0, "b": 2.0}
    (segment,) = episode.segments
    assert segment.is_terminated and not segment.is_truncated and segment.num_turns == 2
    assert segment.segment_id == "e0-p3/1/0/0"
    # The segment is the last prompt and what was sampled for it: o n e <|end|> was 4 ids, t w o <|end|> 4 more.
    assert segment.token_ids[:-4].tolist() == engine.prompts[-1] and segment.n_sampled == 8 == episode.n_sampled
    assert to_arrow("segments", episode.segments, run="r", attempt=1, producer="w", seq=0).num_rows == 1
    assert type(runner.make_env(prompt)).closed == 1


async def test_agent_sees_text_without_stop_token_and_ids_with_it(prompt, renderer) -> None:
    seen = []

    class Watching(ScriptedEnv):
        async def step(self, action: agents.Action) -> agents.Result:
            seen.append(action)
            return DONE

    await run(runner_of(base=Watching), prompt, renderer, "one")
    assert seen[0].text == "one" and seen[0].token_ids[-1] == renderer.stop_token_ids[0] and not seen[0].is_cut


async def test_absent_zero_and_unscorable_rewards_are_three_states(prompt, renderer) -> None:
    for result, reward in [
        (agents.Result(terminated=True, truncated=False), None),
        (agents.Result(terminated=True, truncated=False, reward=0.0), 0.0),
        (agents.Result(terminated=True, truncated=False, reward=1.0, outcome=1.0, unscorable="the verifier timed out"), None),
    ]:
        episode, _ = await run(runner_of(result), prompt, renderer, "one")
        assert episode.reward == reward and episode.segments[0].reward == reward
        assert episode.outcome is None and episode.segments[0].outcome is None


async def test_turn_limit_is_graded_by_the_agent_and_marked_truncated(prompt, renderer) -> None:
    episode, engine = await run(runner_of(GO_ON, GO_ON, GO_ON), prompt, renderer, "one", max_turns=3)
    assert episode.stop_reason == "max_turns" and episode.reward == 0.0 and len(engine.prompts) == 3
    assert episode.segments[0].is_truncated and not episode.segments[0].is_terminated


async def test_context_limit_ends_the_rollout_and_keeps_what_was_earned(prompt, renderer) -> None:
    # 37+58 with its markers is 8 ids; "one" is 4 more, the next prompt 12 + 1 (user) + 4 (more) + 2 = 19 > 18.
    episode, _ = await run(runner_of(replace(GO_ON, reward=0.5)), prompt, renderer, "one", max_len=18)
    assert episode.stop_reason == "context" and episode.reward == 0.5
    assert episode.segments[0].n_tokens == 12


async def test_calls_never_pass_the_context(prompt, renderer) -> None:
    episode, engine = await run(runner_of(DONE), prompt, renderer, "a long answer", max_len=12)
    assert engine.samplings[0].max_new_tokens == 4 and episode.segments[0].n_tokens == 12
    assert episode.stop_reason == "max_tokens" and episode.segments[0].is_truncated


async def test_cut_answer_is_truncated_even_if_the_agent_says_terminated(prompt, renderer) -> None:
    episode, _ = await run(runner_of(DONE), prompt, renderer, "a long answer", max_new_tokens=4)
    assert episode.stop_reason == "max_tokens" and episode.reward == 1.0
    assert episode.segments[0].is_truncated and episode.segments[0].is_terminated


async def test_prompt_that_leaves_no_room_is_named_and_not_a_crash(prompt, renderer) -> None:
    with pytest.raises(PromptTooLongError, match=r"8 tokens, data.max_len=8 leaves no room"):
        await run(runner_of(DONE), prompt, renderer, "one", max_len=8)


async def test_agent_that_raises_fails_the_rollout_with_its_place(prompt, renderer) -> None:
    runner = runner_of(KeyError("no such key"))
    with pytest.raises(AgentError, match=r"KeyError: 'no such key' \(.*test_episode.py:\d+\)"):
        await run(runner, prompt, renderer, "one")
    assert type(runner.make_env(prompt)).closed == 1


async def test_error_inside_a_library_names_the_agents_own_line_first(prompt, renderer) -> None:
    async def step() -> agents.Result:
        return agents.Result(terminated=True, truncated=False, reward=json.loads("{"))

    with pytest.raises(AgentError, match=r"JSONDecodeError: .* \(.*test_episode.py:\d+, raised at .*decoder.py:\d+\)"):
        await run(runner_of(step), prompt, renderer, "one")


async def test_agent_that_overruns_without_earnings_fails(prompt, renderer) -> None:
    with pytest.raises(AgentTimeoutError, match=r"rollout.timeout_s=0.05 was reached in the agent's code, after 1 model calls"):
        await run(runner_of(hang), prompt, renderer, "one", timeout_s=0.05)


async def test_slow_model_call_is_named_in_the_timeout(prompt, renderer) -> None:
    async def slow(_: object) -> None:
        await asyncio.sleep(60)

    with pytest.raises(AgentTimeoutError, match="in a model call"):
        await run(runner_of(DONE), prompt, renderer, slow, timeout_s=0.05)


async def test_timed_out_rollout_keeps_the_reward_that_it_earned(prompt, renderer) -> None:
    # +1 at step 3, time is up at step 5.
    script = (GO_ON, GO_ON, replace(GO_ON, reward=1.0), GO_ON, hang)
    episode, _ = await run(runner_of(*script), prompt, renderer, "one", timeout_s=0.3)
    assert episode.reward == 1.0 and episode.stop_reason == "timeout" and episode.segments[0].is_truncated
    assert episode.num_turns == 5


async def test_explicit_zero_does_not_turn_a_timeout_into_a_reward_of_zero(prompt, renderer) -> None:
    with pytest.raises(AgentTimeoutError):
        await run(runner_of(replace(GO_ON, reward=0.0), hang), prompt, renderer, "one", timeout_s=0.05)


async def test_agent_that_swallows_cancellation_does_not_hold_the_worker(prompt, renderer, monkeypatch) -> None:
    async def stubborn() -> agents.Result:
        for _ in range(3):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue
        return DONE

    monkeypatch.setattr("molt.agents.episode.CLOSE_TIMEOUT_S", 0.05)
    with pytest.raises(AgentTimeoutError):
        await run(runner_of(stubborn), prompt, renderer, "one", timeout_s=0.05)
    await asyncio.sleep(0.5)


async def test_engine_error_is_the_cause_even_if_the_agent_swallows_it(prompt, renderer) -> None:
    class Swallowing(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            try:
                await model.generate(prompt.messages)
            except Exception:
                return DONE
            raise AssertionError("the engine failed")

    with pytest.raises(EngineError, match="engine is gone"):
        await run(Swallowing(), prompt, renderer, EngineError("engine is gone"))


async def test_answer_without_lineage_is_a_lineage_error(prompt, renderer) -> None:
    bad = replace(generation([5, 1]), logprobs=np.array([np.nan, -1], np.float32))
    with pytest.raises(LineageError, match="token 0"):
        await run(runner_of(DONE), prompt, renderer, bad)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "return a Result"),
        (replace(GO_ON, observation=agents.Observation(messages=())), "no messages"),
        (replace(GO_ON, observation=agents.Observation(messages=({"role": "assistant", "content": "x"},))), "assistant"),
        (replace(GO_ON, observation=agents.Observation(messages=({"role": "user", "content": 5},))), "must be an object with a role"),
        (replace(GO_ON, reward=3e38), r"add up to 6e\+38, which is not finite"),
        (replace(GO_ON, observation=agents.Observation.user("a\ud83d")), r"messages\[0\] holds half a character"),
    ],
)
async def test_broken_contract_names_what_is_wrong(prompt, renderer, said, reason) -> None:
    with pytest.raises(AgentError, match=reason):
        await run(runner_of(said, said), prompt, renderer, "one")


def test_result_that_says_nothing_is_refused() -> None:
    with pytest.raises(TypeError):
        agents.Result(reward=1.0)  # type: ignore[call-arg]
    with pytest.raises(AgentError, match="without an observation"):
        agents.Result(terminated=False, truncated=False)
    for reward in (float("nan"), float("-inf"), -1e39):  # the log would keep the last one as minus infinity
        with pytest.raises(AgentError, match="must be finite"):
            agents.Result(terminated=True, truncated=False, reward=reward)
    with pytest.raises(AgentError, match=r"metrics=\{'tool': 'calc'\}\), metrics are numbers by name"):
        agents.Result(terminated=True, truncated=False, metrics={"tool": "calc"})  # type: ignore[dict-item]
    assert agents.Result(terminated=True, truncated=False, metrics={"share": np.float32(0.5)}).metrics == {"share": 0.5}
    with pytest.raises(AgentError, match="must be True or False"):
        agents.Result(terminated=None, truncated=False)  # type: ignore[arg-type]
    for given, kind in [("0.5", "str"), ([0.5], "list"), (1j, "complex"), (np.array([1.0, 2.0]), "ndarray"), (torch.zeros(2), "Tensor")]:
        with pytest.raises(AgentError, match=rf"Result\(reward=.*\), it is a {kind}; give one number, or None"):
            agents.Result(terminated=True, truncated=False, reward=given)  # type: ignore[arg-type]
    with pytest.raises(AgentError, match=r"Result\(outcome=inf\), it must be finite"):
        agents.Result(terminated=True, truncated=False, outcome=10**400)
    with pytest.raises(AgentError, match=r"unscorable='.*it says nothing"):
        agents.Result(terminated=True, truncated=False, reward=1.0, unscorable="")


def test_numbers_of_any_library_become_plain_ones() -> None:
    given = [
        True,
        1,
        np.float32(0.5),
        np.array([0.5]),
        np.bool_(True),
        torch.tensor(0.5, requires_grad=True),
        torch.tensor([0.5]),
        Fraction(1, 2),
    ]
    results = [agents.Result(terminated=np.bool_(True), truncated=False, reward=value) for value in given]  # type: ignore[arg-type]
    assert [(type(result.reward), result.reward) for result in results] == [(float, value) for value in (1, 1, 0.5, 0.5, 1, 0.5, 0.5, 0.5)]
    assert {result.terminated for result in results} == {True} and type(results[0].terminated) is bool


async def test_cut_call_goes_on_in_the_same_turn_within_its_budget(prompt, renderer) -> None:
    first = generation([40, 41, 42], version=3, finish_reason=FinishReason.ABORT)
    second = generation([43, 1], version=4)
    episode, engine = await run(runner_of(DONE), prompt, renderer, first, second, max_new_tokens=10)
    assert engine.prompts[1] == [*engine.prompts[0], 40, 41, 42]
    assert [sampling.max_new_tokens for sampling in engine.samplings] == [10, 7]
    (segment,) = episode.segments
    assert segment.n_sampled == 5 and segment.num_turns == 1
    assert [span.policy_version for span in segment.spans if span.source is TokenSource.POLICY] == [3, 4]


async def test_call_cut_again_and_again_is_an_engine_error(prompt, renderer) -> None:
    with pytest.raises(EngineError, match="was cut 16 times"):
        await run(runner_of(DONE), prompt, renderer, generation([], finish_reason=FinishReason.ABORT))


async def test_every_call_of_every_member_has_its_own_seed(prompt, renderer) -> None:
    seeds = set()
    for member in range(3):
        engine = ScriptedEngine(renderer.tokenizer, "one")
        await run_episode(
            runner_of(GO_ON, DONE),
            prompt,
            engine.generate,
            renderer,
            limits=EpisodeLimits(max_turns=5, max_len=200, timeout_s=5),
            sampling=Sampling(max_new_tokens=8),
            ids=EpisodeIds(group_id="g", member=member, try_number=0, group_size=3, epoch=0, engine="e"),
        )
        seeds |= {sampling.seed for sampling in engine.samplings}
    assert len(seeds) == 6


async def test_evaluation_rollouts_are_never_trainable(prompt, renderer) -> None:
    episode, _ = await run(runner_of(DONE), prompt, renderer, "one", purpose="eval")
    assert episode.segments[0].n_sampled == 4 and episode.segments[0].n_trainable == 0


async def test_cancelled_rollout_closes_its_env(prompt, renderer) -> None:
    runner = runner_of(hang)
    task = asyncio.ensure_future(run(runner, prompt, renderer, "one"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert type(runner.make_env(prompt)).closed == 1


class Summarising(agents.AgentRunner):
    """Owns its loop: after each answer the history is replaced by a summary."""

    async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
        messages = list(prompt.messages)
        for _ in range(3):
            action = await model.generate(messages)
            messages = [{"role": "user", "content": f"so far: {action.text}"}]
        return agents.Result(terminated=True, truncated=False, reward=0.5)


async def test_own_loop_that_rewrites_history_leaves_one_segment_for_each_history(prompt, renderer) -> None:
    episode, engine = await run(Summarising(), prompt, renderer, "one", "two", "three")
    assert [segment.opened_by for segment in episode.segments] == ["start", "compaction", "compaction"]
    assert [segment.num_segments for segment in episode.segments] == [3, 3, 3]
    assert {segment.reward for segment in episode.segments} == {0.5}
    for segment, prompt_ids in zip(episode.segments, engine.prompts, strict=True):
        assert segment.token_ids[: len(prompt_ids)].tolist() == prompt_ids


class Chatting(agents.AgentRunner):
    """Owns its loop and appends to it."""

    async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
        messages = list(prompt.messages)
        while True:
            action = await model.generate(messages, max_new_tokens=6)
            messages += [action.message, {"role": "user", "content": "more"}]


async def test_limit_leaves_an_own_loop_and_is_graded(prompt, renderer) -> None:
    episode, engine = await run(Chatting(), prompt, renderer, "one", max_turns=4)
    assert episode.stop_reason == "max_turns" and episode.reward == 0.0 and len(episode.segments) == 1
    assert {sampling.max_new_tokens for sampling in engine.samplings} == {6}


async def test_limit_leaves_through_a_task_group_of_the_agent(prompt, renderer) -> None:
    class Grouping(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            messages = list(prompt.messages)
            while True:
                async with asyncio.TaskGroup() as group:
                    call = group.create_task(model.generate(messages))
                messages += [call.result().message, {"role": "user", "content": "more"}]

    episode, _ = await run(Grouping(), prompt, renderer, "one", max_turns=3)
    assert (episode.stop_reason, episode.num_turns, episode.reward) == ("max_turns", 3, 0.0)


async def test_call_after_one_that_the_agent_gave_up_is_a_request_of_its_own(prompt, renderer) -> None:
    # The engine may still be ending the first under its name, and would refuse another prompt under it.
    class Impatient(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await model.generate(prompt.messages)
            action = await model.generate([{"role": "user", "content": "shorter"}])
            assert action.turn == 0
            return DONE

    async def slow(_: object):
        await asyncio.sleep(5)

    episode, engine = await run(Impatient(), prompt, renderer, slow, "one")
    assert len(set(engine.request_ids)) == 2 and len({sampling.seed for sampling in engine.samplings}) == 2
    (segment,) = episode.segments
    assert segment.token_ids.tolist() == engine.prompts[1] + renderer.tokenizer.encode("one<|end|>").tolist()
    assert (episode.num_turns, segment.opened_by) == (1, "start")


@pytest.mark.parametrize("asked", [0, -1, 2.5])
async def test_call_that_may_sample_nothing_is_refused(prompt, renderer, asked: float) -> None:
    # 0 is what is left of an agent's own budget, not "as many as fit".
    class Thrifty(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            await model.generate(prompt.messages, max_new_tokens=asked)
            return DONE

    with pytest.raises(AgentError, match=r"max_new_tokens=.* must be a whole number above 0"):
        await run(Thrifty(), prompt, renderer, "one")


async def test_two_calls_at_once_in_one_rollout_are_refused(prompt, renderer) -> None:
    class Hasty(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            await asyncio.gather(model.generate(prompt.messages), model.generate(prompt.messages))
            return DONE

    async def slow(_: object):
        await asyncio.sleep(0.05)
        return generation([40, 1])

    with pytest.raises(AgentError, match="await one before the next"):
        await run(Hasty(), prompt, renderer, slow)


async def test_empty_answer_is_no_parent_of_its_retry(prompt, renderer) -> None:
    class Retrying(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            while not (await model.generate(prompt.messages)).text:
                pass
            return DONE

    empty = generation([], finish_reason=FinishReason.LENGTH)
    episode, engine = await run(Retrying(), prompt, renderer, empty, "abc")
    (segment,) = episode.segments
    assert segment.opened_by == "start" and segment.n_sampled == 4
    assert segment.token_ids.tolist() == [*engine.prompts[0], *renderer.tokenizer.encode("abc<|end|>")]


class Ending(BaseException):
    """Raised by code that means to end everything."""


@pytest.mark.parametrize("place", ["__init__", "reset", "step", "cut", "close"])
@pytest.mark.parametrize("kind", [SystemExit, Ending, asyncio.CancelledError])
async def test_what_an_agent_raises_beside_exceptions_fails_its_rollout_alone(prompt, renderer, place: str, kind: type) -> None:
    # Raised on, SystemExit ends the loop that all rollouts of a worker share, and CancelledError passes for a rollout that was cancelled.
    def leave(*_: object) -> None:
        raise kind("leaving")

    async def leave_later(*_: object) -> None:
        leave()

    env = type("Leaving", (ScriptedEnv,), {"script": (GO_ON,) * 9 if place == "cut" else (DONE,)})
    runner = type("LeavingRunner", (agents.AgentRunner,), {"env": env})()
    setattr(env, place, leave if place == "__init__" else leave_later)
    with pytest.raises(AgentError, match=rf"{kind.__name__}: leaving, which is no Exception \(.*test_episode.py"):
        await run(runner, prompt, renderer, "one", max_turns=2)


async def test_a_close_that_raises_does_not_hide_what_ended_the_rollout(prompt, renderer) -> None:
    class Closing(ScriptedEnv):
        async def close(self) -> None:
            raise OSError("already closed")

    with pytest.raises(AgentError, match="KeyError: 'the cause'"):
        await run(runner_of(KeyError("the cause"), base=Closing), prompt, renderer, "one")
    task = asyncio.ensure_future(run(runner_of(hang, base=Closing), prompt, renderer, "one"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(AgentError, match="already closed"):
        await run(runner_of(DONE, base=Closing), prompt, renderer, "one")


async def test_an_agent_that_goes_on_after_its_time_gets_no_further_answer(prompt, renderer, monkeypatch) -> None:
    said = []

    class Deaf(agents.AgentRunner):
        async def run(self, prompt: Prompt, model: agents.Model) -> agents.Result:
            for _ in range(3):
                try:
                    await model.generate(prompt.messages)
                except BaseException as error:
                    said.append(type(error).__name__)
            await asyncio.sleep(60)
            return DONE

    async def slow(_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("molt.agents.episode.CLOSE_TIMEOUT_S", 0.05)
    with pytest.raises(AgentTimeoutError, match="in a model call"):
        await run(Deaf(), prompt, renderer, slow, timeout_s=0.05)
    assert said == ["CancelledError", "LimitReached", "LimitReached"]
