-- Which steps that a later attempt trained again by the same plan and settings took in another batch?
-- parameters: none
-- grain: one row per step and span of attempts whose settings give equal numbers
-- empty when all is well
with eras as (
    select attempts.attempt, count(settings_changed.attempt) as era
    from attempts left join settings_changed on settings_changed.attempt <= attempts.attempt and not settings_changed.is_exact
    group by attempts.attempt
),
batches as (
    select step, era, count(distinct batch_digest) as num_batches, list(distinct attempt order by attempt) as attempts
    from step_trained join eras using (attempt) group by step, era
),
plans as (
    select step, era, count(distinct plan_digest) as num_plans from batch_planned join eras using (attempt) group by step, era
),
answer as (
    select step, attempts, num_batches from batches left join plans using (step, era) where num_batches > 1 and coalesce(num_plans, 1) = 1
)
select * from answer
