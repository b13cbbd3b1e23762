"""What each estimator pays, in hand-made cases."""

from __future__ import annotations

import pytest
import torch

from molt.algo.advantage import compute_advantages, estimator, estimator_names, get_estimator
from molt.algo.estimators import estimator_file, load_estimators
from molt.errors import NonFiniteError, SettingError
from tests.algo.build import algo, batch_of, group

GROUP_ESTIMATORS = ["reinforce_baseline", "rloo", "grpo", "dr_grpo"]
REWARD_ESTIMATORS = ["reinforce", *GROUP_ESTIMATORS, "flash_reinforce"]


def advantages(name, rollouts, settings=None, **columns):
    return compute_advantages(name, batch_of(rollouts), settings or algo(), **columns).advantages_T


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-6)


def test_three_right_of_eight_under_each_group_estimator():
    # mean 3/8 = 0.375; centred 0.625 / -0.375; others' mean 2/7 for a right one, 3/7 for a wrong one;
    # sample variance (3 * 0.625^2 + 5 * 0.375^2) / 7 = 0.267857, deviation 0.517549
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    close(advantages("dr_grpo", group(rewards))[[0, 7]], [0.625, -0.375])
    close(advantages("rloo", group(rewards))[[0, 7]], [1 - 2 / 7, -3 / 7])
    found = advantages("grpo", group(rewards))[[0, 7]]
    torch.testing.assert_close(found, torch.tensor([1.2076, -0.7246]), atol=5e-5, rtol=0)


def test_reinforce_baseline_whitens_over_the_batch():
    # centred 0.5, -0.5 with 1 and 3 tokens: token mean (0.5 - 1.5) / 4 = -0.25, variance (0.75^2 + 3 * 0.25^2) / 4 = 0.1875
    rollouts = [{"group": "a", "reward": 1.0, "segments": [1]}, {"group": "a", "reward": 0.0, "segments": [3]}]
    close(advantages("reinforce_baseline", rollouts), [0.75 / 0.1875**0.5] + [-0.25 / 0.1875**0.5] * 3)


def test_whitening_moves_a_group_of_equal_rewards_with_the_rest():
    # Centred: 0.5 at one token, -0.5 at three, 0 at the two of group b. Mean -1/6, variance 1/6 - 1/36 = 5/36: 4, -2 and 1 over sqrt(5).
    rollouts = [
        {"group": "a", "reward": 1.0, "segments": [1]},
        {"group": "a", "reward": 0.0, "segments": [3]},
        *group([1.0, 1.0], name="b"),
    ]
    root = 5**0.5
    close(advantages("reinforce_baseline", rollouts), [4 / root, *[-2 / root] * 3, 1 / root, 1 / root])


def test_other_groups_do_not_move_a_group():
    alone = advantages("grpo", group([1.0, 0.0, 0.0]))
    beside = advantages("grpo", group([1.0, 0.0, 0.0]) + group([5.0, -5.0], name="b"))
    assert torch.equal(alone, beside[:3])


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "flash_reinforce"])
def test_one_scored_rollout_gets_exactly_zero(name):
    assert advantages(name, group([1.0])).tolist() == [0.0]
    assert advantages(name, group([None, None, 1.0])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", REWARD_ESTIMATORS)
def test_equal_rewards_get_exactly_zero(name):
    # 0.1 is not a binary fraction: a mean of three of them differs from it in the last bit
    assert advantages(name, group([0.1, 0.1, 0.1])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", REWARD_ESTIMATORS)
def test_a_batch_without_any_score_is_all_zero(name):
    assert advantages(name, group([None, None, None])).tolist() == [0.0, 0.0, 0.0]


def test_unscored_members_do_not_move_the_baseline():
    # scored members are 1 and 0: centred 0.5 / -0.5, others' mean 0 / 1, deviation sqrt(0.5)
    rewards = [None, 1.0, 0.0, None]
    close(advantages("dr_grpo", group(rewards)), [0.0, 0.5, -0.5, 0.0])
    close(advantages("rloo", group(rewards)), [0.0, 1.0, -1.0, 0.0])
    close(advantages("grpo", group(rewards)), [0.0, 0.5 / 0.5**0.5, -0.5 / 0.5**0.5, 0.0])


def test_unscored_rollouts_are_counted_apart_from_zero_rewards():
    metrics = compute_advantages("rloo", batch_of(group([None, 1.0, 0.0, None])), algo()).metrics
    assert metrics["num_unscored_rollouts"] == 2
    assert metrics["reward_mean"] == 0.5


def test_a_rollout_of_five_segments_is_paid_once():
    # A: five segments, reward 0; B: one segment, reward 1. Mean over rollouts 0.5, so +-0.5 whatever the segments
    rollouts = [{"group": "a", "reward": 0.0, "segments": [1] * 5}, {"group": "a", "reward": 1.0, "segments": [1]}]
    result = compute_advantages("dr_grpo", batch_of(rollouts), algo())
    close(result.advantages_T, [-0.5] * 5 + [0.5])
    assert result.metrics["reward_mean"] == 0.5


def test_groups_are_found_by_key_in_any_order():
    # A(4), B(3), C(1) interleaved
    members = [("a", 1.0), ("b", 1.0), ("a", 0.0), ("c", 1.0), ("b", 0.0), ("a", 0.0), ("b", 0.0), ("a", 0.0)]
    rollouts = [{"group": g, "reward": r, "segments": [1]} for g, r in members]
    # A mean 1/4, B mean 1/3, C alone
    expected = [0.75, 2 / 3, -0.25, 0.0, -1 / 3, -0.25, -1 / 3, -0.25]
    close(advantages("dr_grpo", rollouts), expected)
    order = [3, 7, 0, 6, 1, 5, 2, 4]
    close(advantages("dr_grpo", [rollouts[i] for i in order]), [expected[i] for i in order])


def test_discount_counts_sampled_tokens_only():
    # rewards [0, 0, 1], mask [1, 0, 1], gamma 0.5: the observation between is transparent, returns 0.5 and 1
    rollouts = [{"group": "a", "reward": 1.0, "segments": [3]}]
    batch = batch_of(rollouts, is_trainable_T=torch.tensor([True, False, True]))
    settings = algo(advantage={"gamma": 0.5, "whiten": False})
    assert compute_advantages("reinforce", batch, settings).advantages_T.tolist() == [0.5, 0.0, 1.0]


def test_discount_runs_over_the_segments_of_a_rollout():
    rollouts = [{"group": "a", "reward": 1.0, "segments": [1, 2]}, {"group": "b", "reward": 2.0, "segments": [1]}]
    settings = algo(advantage={"gamma": 0.5, "whiten": False})
    assert advantages("reinforce", rollouts, settings).tolist() == [0.25, 0.5, 1.0, 2.0]


def test_segments_of_a_rollout_may_lie_apart():
    rollouts = [{"group": "a", "reward": 1.0, "segments": [1]}, {"group": "b", "reward": 2.0, "segments": [1]}]
    batch = batch_of(
        rollouts,
        lengths_S=torch.tensor([1, 1, 2]),
        n_tokens_S=torch.tensor([1, 1, 2]),
        rollout_S=torch.tensor([0, 1, 0]),
    )
    settings = algo(advantage={"gamma": 0.5, "whiten": False})
    assert compute_advantages("reinforce", batch, settings).advantages_T.tolist() == [0.25, 2.0, 0.5, 1.0]


def test_divergence_as_reward_is_a_cost_to_go():
    # penalty -0.1 * (1, 2, 3); suffix sums -0.6, -0.5, -0.3; plus the reward 1
    rollouts = [{"group": "a", "reward": 1.0, "segments": [3]}]
    settings = algo(advantage={"whiten": False}, kl={"coef": 0.1, "use": "reward"})
    close(advantages("reinforce", rollouts, settings, kl_T=torch.tensor([1.0, 2.0, 3.0])), [0.4, 0.5, 0.7])


def test_divergence_as_loss_leaves_the_advantage_alone():
    settings = algo(kl={"coef": 0.1, "use": "loss"})
    kl_T = torch.tensor([1.0, 2.0])
    assert torch.equal(advantages("dr_grpo", group([1.0, 0.0]), settings, kl_T=kl_T), advantages("dr_grpo", group([1.0, 0.0])))


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5, values (1, 2), reward 4 at the end: delta = 0 + 0.5*2 - 1 = 0, 4 - 2 = 2; A = 0 + 0.25*2 = 0.5, 2
    settings = algo(advantage={"gamma": 0.5, "lambd": 0.5, "whiten": False})
    result = compute_advantages(
        "gae", batch_of([{"group": "a", "reward": 4.0, "segments": [2]}]), settings, values_T=torch.tensor([1.0, 2.0])
    )
    assert result.advantages_T.tolist() == [0.5, 2.0]
    assert result.returns_T.tolist() == [1.5, 4.0]


def test_gae_steps_over_masked_tokens():
    # the masked token's value 100 is not seen: same numbers as the two-token case above
    settings = algo(advantage={"gamma": 0.5, "lambd": 0.5, "whiten": False})
    batch = batch_of([{"group": "a", "reward": 4.0, "segments": [3]}], is_trainable_T=torch.tensor([True, False, True]))
    result = compute_advantages("gae", batch, settings, values_T=torch.tensor([1.0, 100.0, 2.0]))
    assert result.advantages_T.tolist() == [0.5, 0.0, 2.0]


def test_gae_pays_the_last_trainable_token():
    settings = algo(advantage={"whiten": False})
    batch = batch_of([{"group": "a", "reward": 4.0, "segments": [3]}], is_trainable_T=torch.tensor([True, True, False]))
    result = compute_advantages("gae", batch, settings, values_T=torch.zeros(3))
    assert result.advantages_T.tolist() == [4.0, 4.0, 0.0]


def test_distillation_pays_the_teachers_surplus_and_needs_no_reward():
    student, teacher = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -3.0])
    found = advantages("on_policy_distill", group([None], length=2), logprobs_T=student, teacher_logprobs_T=teacher)
    assert found.tolist() == [0.5, -1.0]


def test_flash_reinforce_needs_one_rollout_per_prompt():
    rollouts = group([1.0], name="a") + group([0.0], name="b") + group([None], name="c") + group([0.5], name="d")
    close(advantages("flash_reinforce", rollouts), [0.5, -0.5, 0.0, 0.0])


def test_a_wholly_masked_batch_is_all_zero():
    batch = batch_of(group([1.0, 0.0], length=2), is_trainable_T=torch.zeros(4, dtype=torch.bool))
    for name in REWARD_ESTIMATORS:
        assert compute_advantages(name, batch, algo()).advantages_T.tolist() == [0.0] * 4


def test_an_empty_batch_has_no_advantages():
    for name in REWARD_ESTIMATORS:
        assert advantages(name, []).shape == (0,)


@pytest.mark.parametrize("reward", [float("inf"), float("-inf")])
def test_an_infinite_reward_is_refused_by_place(reward):
    with pytest.raises(NonFiniteError, match="reward of rollout 1"):
        advantages("rloo", group([0.0, reward]))


def test_a_value_that_is_not_finite_is_refused():
    with pytest.raises(NonFiniteError, match="sampled token"):
        compute_advantages("gae", batch_of(group([1.0], length=2)), algo(), values_T=torch.tensor([1.0, float("nan")]))


def test_a_million_tokens_in_one_rollout():
    # gamma 1: every token gets the reward; gamma < 1: the last gets it, the one before gamma times it
    settings = algo(advantage={"gamma": 0.999, "whiten": False}, kl={"coef": 1.0, "use": "reward"})
    rollouts = [{"group": "a", "reward": 1.0, "segments": [1_000_000]}]
    found = advantages("reinforce", rollouts, settings, kl_T=torch.full((1_000_000,), -1.0))
    # a reward of 1 per token is worth (1 - 0.999^n) / 0.001 from n tokens before the end
    assert found[0] == pytest.approx(1000.0, rel=1e-6)
    assert found[-2:].tolist() == pytest.approx([0.999 + 1.999, 2.0])


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(SettingError, match=r"estimator=grpoo is unknown; known are dr_grpo, .*rloo"):
        advantages("grpoo", group([1.0]))


@pytest.mark.parametrize(("name", "column"), [("gae", "values"), ("on_policy_distill", "logprobs")])
def test_a_missing_column_is_named(name, column):
    with pytest.raises(SettingError, match=f"{name} needs {column}"):
        advantages(name, group([1.0]))


def test_a_discount_that_does_nothing_is_refused():
    with pytest.raises(SettingError, match=r"gamma=0.9 does nothing under algo.advantage.estimator=grpo"):
        advantages("grpo", group([1.0, 0.0]), algo(advantage={"gamma": 0.9}))


def test_a_user_registers_an_estimator_in_a_file(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(
        "from molt.algo.advantage import estimator\n"
        "@estimator('test_best_of', unit='rollout')\n"
        "def best_of(inputs):\n"
        "    return inputs.spread((inputs.reward_U == inputs.reward_U.max()).double())\n"
    )
    for _ in range(2):  # the driver and a worker may load the same file
        exec(compile(path.read_text(), str(path), "exec"), {})
    assert "test_best_of" in estimator_names()
    assert advantages("test_best_of", group([0.0, 3.0], length=2)).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_another_process_finds_the_file_of_an_estimator(tmp_path):
    path = tmp_path / "pipeline.py"
    path.write_text(
        "from molt.algo.estimators import estimator\n"
        "@estimator('test_from_pipeline')\n"
        "def constant(inputs):\n"
        "    return inputs.spread(inputs.reward_U * 0 + 1)\n"
    )
    load_estimators(str(path))
    load_estimators(str(path))
    assert estimator_file("test_from_pipeline") == str(path)
    assert estimator_file("grpo") is None
    assert advantages("test_from_pipeline", group([0.0])).tolist() == [1.0]
    with pytest.raises(SettingError, match="which is not there"):
        load_estimators(str(tmp_path / "gone.py"))


def test_a_name_of_another_file_is_not_taken():
    with pytest.raises(SettingError, match="grpo is registered already"):
        estimator("grpo")(lambda inputs: inputs.spread(inputs.reward_U))
    assert get_estimator("grpo").unit == "rollout"


def test_an_estimator_may_pay_each_segment():
    @estimator("test_by_segment", unit="segment")
    def by_segment(inputs):
        return inputs.spread(inputs.centred_by_group())

    # segments as members: rewards 0, 0, 1, mean 1/3
    rollouts = [{"group": "a", "reward": 0.0, "segments": [1, 1]}, {"group": "a", "reward": 1.0, "segments": [1]}]
    close(advantages("test_by_segment", rollouts), [-1 / 3, -1 / 3, 2 / 3])


def test_a_result_of_the_wrong_shape_is_refused():
    @estimator("test_wrong_shape")
    def wrong(inputs):
        return inputs.reward_U

    with pytest.raises(SettingError, match=r"returned shape \(1,\)"):
        advantages("test_wrong_shape", group([1.0], length=3))
