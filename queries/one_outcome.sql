-- How many of the groups that each step trained had one outcome in all their rollouts, and in how many of those did the rewards differ?
-- parameters: none
-- grain: one row per step that counts; rollouts without a reward do not, and where an agent gives no outcome its reward is one
with trained as (
    select distinct step, group_id, rollout_id from counted_consumption where use_number = 1
),
by_group as (
    select
        trained.step, trained.group_id,
        count(distinct coalesce(rollouts.outcome, rollouts.reward)) filter (where rollouts.reward is not null) as num_outcomes,
        count(distinct rollouts.reward) as num_rewards
    from trained join rollouts using (group_id, rollout_id) where rollouts.purpose = 'train' group by trained.step, trained.group_id
),
answer as (
    select
        step, count(*) as num_groups, count(*) filter (where num_outcomes < 2) as num_of_one_outcome,
        count(*) filter (where num_outcomes < 2 and num_rewards > 1) as num_told_apart
    from by_group group by step order by step
)
select * from answer
