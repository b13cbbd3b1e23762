-- Which segments trained more often than declared?
-- parameters: none
-- grain: one row per segment
-- empty when all is well
with declared as (
    select attempt, coalesce((config->>'$.train.epochs_per_batch')::integer, 1) as num_uses from attempts
),
uses as (
    select
        counted_consumption.segment_id, count(*) as num_uses, count(distinct use_number) as num_use_numbers, max(use_number) as last_use,
        max(coalesce(declared.num_uses, 1)) as num_declared, list(step order by step) as steps
    from counted_consumption join segments using (segment_id) left join declared on declared.attempt = counted_consumption.attempt
    where segments.purpose = 'train'
    group by counted_consumption.segment_id
),
answer as (
    select segment_id, num_uses, num_declared, steps from uses where num_uses > num_declared or num_use_numbers < num_uses or last_use <> num_uses
)
select * from answer
