"""The same loop on real vLLM on the CPU: refits reach the engine, and engine and trainer agree on log-probs."""

from __future__ import annotations

import pytest

from tests.pipelines.conftest import World

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm]


def test_loop_on_vllm_refits_and_agrees_with_the_trainer(world: World):
    off = {"algo__advantage__is_correction_level": "off", "algo__advantage__is_correction_mode": "mask"}
    own_draws = {"vllm__seed_calls": "true", "vllm__enable_chunked_prefill": "false"}  # the same answers in every run of this test
    world.train("vllm", vllm__engine="vllm", train__async_queue_size=0, eval__interval=0, **off, **own_draws)
    world.audit("vllm")
    engines = world.sql("vllm", "select distinct engine from segments")
    assert [row["engine"] for row in engines] == ["vllm-0"]
    digests = world.sql("vllm", "select policy_version, weights_digest from weights_refit order by policy_version")
    assert len({row["weights_digest"] for row in digests}) == 5  # before the first step and after each of four
    gaps = world.sql(
        "vllm",
        """
        with sampled as (
            select s.step, unnest(s.trainer_logprobs) as trainer,
                   unnest(list_filter(g.behaviour_logprobs, lambda x: x is not null)) as engine
            from scores s join segments g using (segment_id)
        )
        select step, avg(abs(trainer - engine)) as gap, count(*) as n from sampled group by step order by step
        """,
    )
    assert [row["step"] for row in gaps] == [0, 1, 2, 3]
    assert all(row["gap"] < 1e-3 and row["n"] > 50 for row in gaps)  # on-policy in float32, after every refit


def test_asynchronous_vllm_with_partial_rollouts_keeps_versions_per_token(world: World):
    world.train(
        "partial",
        vllm__engine="vllm",
        train__partial_rollout_enable="true",
        train__async_queue_size=2,
        rollout__max_new_tokens=48,
        rollout__batch_size=4,
        train__num_steps=6,
    )
    world.audit("partial")
