-- Which steps that a later attempt trained again by the same plan took in another batch?
-- parameters: none
-- grain: one row per step
-- empty when all is well
with batches as (
    select step, count(distinct batch_digest) as num_batches, list(distinct attempt order by attempt) as attempts from step_trained group by step
),
plans as (
    select step, count(distinct plan_digest) as num_plans from batch_planned group by step
),
answer as (
    select step, attempts, num_batches from batches join plans using (step) where num_batches > 1 and num_plans = 1
)
select * from answer
