"""Reward shaping, and a batch from the rows of a plan."""

from __future__ import annotations

import pytest
import torch

from molt.algo.batch import RaggedBatch
from molt.algo.reward import shape_rewards
from molt.errors import DataError
from tests.algo.build import algo, batch_of, group


def shaped(rollouts, max_len=100, **keys):
    return shape_rewards(batch_of(rollouts), algo(reward=keys), max_len=max_len)


def test_nothing_asked_nothing_changed():
    assert shaped(group([0.25, -3.0])).batch.reward_R.tolist() == [0.25, -3.0]


def test_reward_is_clipped_to_its_range():
    found = shaped(group([5.0, -5.0, 0.5]), clip=(-1.0, 1.0))
    assert found.batch.reward_R.tolist() == [1.0, -1.0, 0.5]
    assert found.metrics["num_clipped"] == 2


def test_overlong_grows_linearly_inside_the_buffer():
    # max_len 100, buffer 20: 80 tokens 0, 90 tokens 0.5, 100 tokens 1; the batch adds 3 prompt tokens to each segment
    rollouts = [{"group": "a", "reward": 1.0, "segments": [n - 3]} for n in (80, 90, 100)]
    found = shaped(rollouts, overlong_buffer=20, overlong_penalty=1.0)
    assert found.batch.reward_R.tolist() == [1.0, 0.5, 0.0]
    assert found.metrics["num_overlong"] == 2


def test_overlong_looks_at_the_longest_segment():
    found = shaped([{"group": "a", "reward": 1.0, "segments": [10, 97, 10]}], overlong_buffer=20, overlong_penalty=0.5)
    assert found.batch.reward_R.tolist() == [0.5]


def test_a_truncated_rollout_keeps_a_part_of_its_reward():
    rollouts = [{"group": "a", "reward": 1.0, "segments": [1], "truncated": t} for t in (True, False)]
    found = shaped(rollouts, stop_properly_penalty=0.25)
    assert found.batch.reward_R.tolist() == [0.25, 1.0]
    failures = [row | {"reward": -1.0} for row in rollouts]  # a factor would make the failure that was cut the better one
    assert shaped(failures, stop_properly_penalty=0.25).batch.reward_R.tolist() == [-1.0, -1.0]
    assert found.metrics["num_stopped_improperly"] == 1


def test_groups_that_shaping_alone_tells_apart_are_counted():
    # Four failures of which some are long; the same where the agent shaped them itself; one of equal rewards; one right and one wrong.
    long = [{"group": "a", "reward": 0.0, "segments": [n - 3]} for n in (50, 85, 90, 95)]
    own = [row | {"outcome": 0.0} for row in group([0.0, 0.01, 0.02, None], name="b")]
    mixed = [row | {"outcome": outcome} for row, outcome in zip(group([1.0, 0.1], name="d"), (1.0, 0.0), strict=True)]
    found = shaped([*own, *long, *group([1.0, 1.0], name="c"), *mixed, *group([None], name="e")], overlong_buffer=20, overlong_penalty=1.0)
    assert found.metrics["num_groups_of_one_outcome"] == 2
    assert shaped([*own, *long]).metrics["num_groups_of_one_outcome"] == 1


def test_an_unscored_rollout_stays_unscored():
    found = shaped(group([None]), clip=(-1.0, 1.0), stop_properly_penalty=0.0, overlong_buffer=99, overlong_penalty=1.0)
    assert torch.isnan(found.batch.reward_R).all()


class Row:
    """A plan's row, as far as a batch reads it."""

    def __init__(self, rollout_id, group_id, n_sampled, reward, outcome=None, is_truncated=False):
        self.rollout_id, self.group_id, self.n_sampled, self.n_tokens = rollout_id, group_id, n_sampled, n_sampled + 1
        self.reward, self.outcome, self.is_truncated = reward, outcome, is_truncated


def test_a_batch_is_made_from_the_rows_of_a_plan():
    batch = RaggedBatch.from_rows([Row("r0", "g0", 2, 1.0), Row("r1", "g1", 1, None), Row("r0", "g0", 3, 1.0)])
    assert batch.rollout_S.tolist() == [0, 1, 0]
    assert batch.group_R.tolist() == [0, 1]
    assert batch.n_sampled_R.tolist() == [5, 1]
    assert batch.rollout_T.tolist() == [0, 0, 1, 0, 0, 0]
    assert torch.isnan(batch.reward_R).tolist() == [False, True]


def test_segments_that_disagree_on_their_rollout_are_refused():
    with pytest.raises(DataError, match="rollout r0: its segments disagree"):
        RaggedBatch.from_rows([Row("r0", "g0", 2, 1.0), Row("r0", "g0", 3, 0.0)])
