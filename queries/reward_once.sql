-- Which rollouts do not have one reward, one number of segments, and each segment once?
-- parameters: none
-- grain: one row per rollout and fault
-- empty when all is well
with finished as (
    select
        rollout_id, count(*) as num_rows, count(distinct segment_index) as num_indices, min(num_segments) as num_least, max(num_segments) as num_most,
        count(distinct coalesce(reward, 'nan'::float)) as num_rewards, max(segment_index) as last_index,
        count(distinct (is_terminated, is_truncated, stop_reason)) as num_endings
    from segments where purpose <> 'sft' group by rollout_id
),
answer as (
    select rollout_id, num_rewards || ' different rewards' as fault from finished where num_rewards > 1
    union all
    select rollout_id, num_rows || ' segments in the log, ' || num_most || ' declared' from finished
    where num_rows <> num_most or num_least <> num_most or num_indices <> num_rows or last_index <> num_rows - 1
    union all
    select rollout_id, num_endings || ' different endings' from finished where num_endings > 1
    union all
    select distinct rollout_id, 'finished and failed' from rollout_failed where rollout_id in (select rollout_id from finished)
)
select * from answer
