-- Which plans say another thing of a segment than its row, or of themselves than what they hold?
-- parameters: none
-- grain: one row per plan and segment, or per plan and figure
-- empty when all is well
-- asked in parts of plans
with plans as (
    select
        lsn, attempt, step, policy_version, seed, cursor, n_sampled, num_segments, num_rollouts, groups,
        from_json(plan, '{"step": "INTEGER", "policy_version": "INTEGER", "seed": "BIGINT", "cursor": "BIGINT", "n_sampled": "BIGINT",
            "num_rollouts": "INTEGER", "num_groups": "INTEGER", "segments": [{"segment_id": "VARCHAR", "rollout_id": "VARCHAR",
            "group_id": "VARCHAR", "prompt_index": "BIGINT", "lsn": "BIGINT", "n_tokens": "INTEGER", "n_sampled": "INTEGER",
            "version_min": "INTEGER", "version_max": "INTEGER", "reward": "FLOAT", "outcome": "FLOAT", "is_truncated": "BOOLEAN"}]}') as inside
    from shown_plans
),
places as (
    select attempt, step, inside.cursor as cursor, unnest(inside.segments) as said from plans
),
out_of_order as (
    select attempt, step, unnest(list_filter(inside.segments, lambda s, i: i > 1 and inside.segments[i - 1].rollout_id = s.rollout_id
        and split_part(inside.segments[i - 1].segment_id, '/', -1)::integer >= split_part(s.segment_id, '/', -1)::integer)).segment_id as segment_id
    from plans
),
beside_rows as (
    select
        places.*, segments.lsn,
        list_filter([
            case when said.rollout_id is distinct from segments.rollout_id then 'rollout_id' end,
            case when said.group_id is distinct from segments.group_id then 'group_id' end,
            case when said.prompt_index is distinct from segments.prompt_index then 'prompt_index' end,
            case when said.n_tokens is distinct from segments.n_tokens then 'n_tokens' end,
            case when said.n_sampled is distinct from case purpose when 'sft' then n_trainable else segments.n_sampled end then 'n_sampled' end,
            case when said.version_min is distinct from segments.version_min then 'version_min' end,
            case when said.version_max is distinct from segments.version_max then 'version_max' end,
            case when said.reward is distinct from segments.reward::float then 'reward' end,
            case when said.outcome is distinct from segments.outcome::float then 'outcome' end,
            case when purpose <> 'sft' and said.is_truncated is distinct from segments.is_truncated then 'is_truncated' end,
            case when purpose <> 'sft' and said.lsn is distinct from segments.lsn then 'lsn' end
        ], lambda name: name is not null) as differing
    from places left join segments on segments.segment_id = said.segment_id
),
figures as (
    select
        attempt, step,
        list_filter([
            case when inside.step is distinct from step then 'step' end,
            case when inside.policy_version is distinct from policy_version then 'policy_version' end,
            case when inside.seed is distinct from seed then 'seed' end,
            case when inside.cursor is distinct from cursor then 'cursor' end,
            case when inside.n_sampled is distinct from n_sampled
                or coalesce(list_sum(list_transform(inside.segments, lambda s: s.n_sampled)), 0) is distinct from n_sampled then 'n_sampled' end,
            case when len(inside.segments) is distinct from num_segments then 'num_segments' end,
            case when inside.num_rollouts is distinct from num_rollouts
                or len(list_distinct(list_transform(inside.segments, lambda s: s.rollout_id))) is distinct from num_rollouts then 'num_rollouts' end,
            case when inside.num_groups is distinct from len(list_distinct(list_transform(inside.segments, lambda s: s.group_id)))
                or list_sort(list_distinct(groups)) is distinct from list_sort(list_distinct(list_transform(inside.segments, lambda s: s.group_id)))
                then 'groups' end
        ], lambda name: name is not null) as differing
    from plans
),
answer as (
    select
        attempt, step, said.segment_id as segment_id,
        case
            when lsn is null then 'it is not in the log'
            when len(differing) > 0 then 'other in the plan: ' || array_to_string(differing, ', ')
            else 'it came after the cursor of the plan'
        end as fault
    from beside_rows where lsn is null or len(differing) > 0 or lsn > cursor
    union all
    select attempt, step, segment_id, 'it stands behind a later segment of its rollout' from out_of_order
    union all
    select attempt, step, null, 'the plan does not hold its own: ' || array_to_string(differing, ', ') from figures where len(differing) > 0
)
select * from answer
