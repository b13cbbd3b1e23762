-- Which prompts were skipped or doubled?
-- parameters: none
-- grain: one row per place in the order of prompts, or per member of a group
-- empty when all is well
with places as (
    select epoch, order_index, count(distinct group_id) as num_groups, count(distinct prompt_index) as num_prompts
    from group_dispatched where purpose = 'train' group by epoch, order_index
),
gaps as (
    select epoch, order_index, lag(order_index, 1, -1) over (partition by epoch order by order_index) as earlier_index from places
),
members as (
    select group_id, member, count(distinct rollout_id) as num_rollouts, list(distinct rollout_id order by rollout_id) as rollouts
    from segments where purpose <> 'sft' group by group_id, member
),
answer as (
    select 'epoch ' || epoch || ', place ' || order_index as id, num_groups || ' groups and ' || num_prompts || ' prompts on one place' as fault
    from places where num_groups > 1 or num_prompts > 1
    union all
    select 'epoch ' || epoch || ', place ' || (earlier_index + 1), 'skipped' from gaps where order_index <> earlier_index + 1
    union all
    select group_id || ' member ' || member, 'finished ' || num_rollouts || ' times: ' || array_to_string(rollouts, ', ')
    from members where num_rollouts > 1
)
select * from answer
