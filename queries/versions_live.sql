-- Which segments carry a policy version that did not exist when they were sampled?
-- parameters: none
-- grain: one row per segment and version
-- empty when all is well
with made as (
    select 0 as policy_version, -1 as made_lsn
    union all select policy_version + 1, min(lsn) from step_trained group by policy_version
    union all select policy_version, min(lsn) from checkpoint_saved group by policy_version
),
first_made as (
    select policy_version, min(made_lsn) as made_lsn from made group by policy_version
),
used as (
    select distinct lsn, segment_id, policy_version from spans where policy_version is not null and purpose <> 'sft'
),
answer as (
    select used.segment_id, used.policy_version, used.lsn as segment_lsn, first_made.made_lsn
    from used left join first_made using (policy_version)
    where first_made.made_lsn is null or first_made.made_lsn > used.lsn
)
select * from answer
