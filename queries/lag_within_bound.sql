-- Which segments were older at their consumption than the bound allows, or have a recorded lag that is not theirs?
-- parameters: none
-- grain: one row per consumption
-- empty when all is well
with bounds as (
    select attempt, coalesce((config->>'$.admission.max_lag')::integer, (config->>'$.train.async_queue_size')::integer) as max_lag from attempts
),
lags as (
    select
        consumption.attempt, consumption.step, consumption.segment_id, consumption.lag as recorded_lag,
        consumption.policy_version - segments.version_min as lag, bounds.max_lag
    from consumption join segments using (segment_id) left join bounds on bounds.attempt = consumption.attempt
    where segments.purpose = 'train'
),
answer as (
    select *, case when lag > max_lag then 'older than the bound' when lag < 0 then 'younger than the weights' else 'recorded lag differs' end as fault
    from lags where lag > max_lag or lag < 0 or lag is distinct from recorded_lag
)
select * from answer
