-- In which segments does a later token carry an older policy version, stale cache entries, or a version that its bounds exclude?
-- parameters: none
-- grain: one row per segment and fault
-- empty when all is well
with sampled as (
    select *, lag(policy_version) over (partition by lsn order by span_index) as earlier_version
    from spans where source = 'policy' and purpose <> 'sft'
),
bounds as (
    select lsn, min(policy_version) as version_min, max(policy_version) as version_max from sampled group by lsn
),
faults as (
    select segment_id, first_position as position, 'policy version falls from ' || earlier_version || ' to ' || policy_version as fault
    from sampled where policy_version < earlier_version
    union all
    select segment_id, first_position, 'cache entries are younger than the token: kv_version ' || kv_version || ' over ' || policy_version
    from sampled where kv_version > policy_version
    union all
    select
        segment_id, first_position,
        'cache entries are older than the token: kv_version ' || kv_version || ' under ' || policy_version || ' with vllm.kv_on_refit=recompute'
    from sampled join attempts using (attempt)
    where kv_version < policy_version and attempts.config->>'$.vllm.kv_on_refit' = 'recompute'
    union all
    select segments.segment_id, null, 'version_min or version_max is not that of its spans'
    from segments join bounds using (lsn)
    where segments.version_min is distinct from bounds.version_min or segments.version_max is distinct from bounds.version_max
),
answer as (
    select * from faults
)
select * from answer
