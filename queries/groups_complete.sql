-- Which groups trained without all their rollouts, which rollouts without all their segments, and which in more than one step?
-- parameters: none
-- grain: one row per group or rollout and fault
-- empty when all is well
with keeps as (
    select attempt, coalesce(config->>'$.admission.incomplete_groups', 'drop') = 'keep' as is_kept from attempts
),
first_uses as (
    select counted_consumption.*, segments.member, segments.group_size, segments.num_segments, coalesce(keeps.is_kept, false) as is_kept
    from counted_consumption join segments using (segment_id) left join keeps on keeps.attempt = counted_consumption.attempt
    where counted_consumption.use_number = 1 and segments.purpose = 'train'
),
trained_groups as (
    select
        group_id, count(distinct member) as num_members, max(group_size) as group_size, count(distinct step) as num_steps, bool_or(is_kept) as is_kept
    from first_uses group by group_id
),
trained_rollouts as (
    select rollout_id, count(distinct segment_id) as num_trained, max(num_segments) as num_segments from first_uses group by rollout_id
),
answer as (
    select group_id as id, num_members || ' of ' || group_size || ' rollouts trained' as fault
    from trained_groups where num_members <> group_size and not is_kept
    union all
    select group_id, 'trained in ' || num_steps || ' steps' from trained_groups where num_steps > 1
    union all
    select rollout_id, num_trained || ' of ' || num_segments || ' segments trained' from trained_rollouts where num_trained <> num_segments
)
select * from answer
