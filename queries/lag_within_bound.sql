-- Which segments were older at their consumption than the bound allows, or have a recorded lag that is not theirs?
-- parameters: none
-- grain: one row per consumption
-- empty when all is well
with bounds as (
    select attempt, coalesce((config->>'$.admission.max_lag')::integer, (config->>'$.train.async_queue_size')::integer) as max_lag from attempts
),
admitted as (
    select group_id, attempt from group_decided where decision = 'admitted'
),
used as (
    -- A plan that a later attempt trains again was admitted under the bound of the attempt that made it.
    select consumption.*, segments.version_min, coalesce(admitted.attempt, consumption.attempt) as bound_by
    from consumption join segments using (segment_id)
    asof left join admitted on admitted.group_id = segments.group_id and consumption.attempt >= admitted.attempt
    where segments.purpose = 'train'
),
lags as (
    select
        used.attempt, used.step, used.segment_id, used.lag as recorded_lag, used.policy_version - used.version_min as lag, bounds.max_lag
    from used left join bounds on bounds.attempt = used.bound_by
),
answer as (
    select *, case when lag > max_lag then 'older than the bound' when lag < 0 then 'younger than the weights' else 'recorded lag differs' end as fault
    from lags where lag > max_lag or lag < 0 or lag is distinct from recorded_lag
)
select * from answer
