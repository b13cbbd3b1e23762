-- After which refits did an engine report other weights than were sent?
-- parameters: none
-- grain: one row per refit and engine
-- empty when all is well
with reports as (
    select lsn, attempt, step, policy_version, weights_digest, unnest(map_entries(engines::json::map(varchar, varchar))) as report from weights_refit
),
answer as (
    select lsn, attempt, step, policy_version, report.key as engine, report.value as reported_digest, weights_digest
    from reports where report.value is distinct from weights_digest
)
select * from answer
