-- Which segments trained without a plan, on another place than planned, or were planned for a trained step and left out?
-- parameters: none
-- grain: one row per step and segment
-- empty when all is well
-- asked in parts of plans
with plans as (
    select step, json_extract_string(plan, '$.segments[*].segment_id') as segment_ids, (plan->'$.micro_batches')::integer[][][] as micro_batches
    from shown_plans where lsn in (select lsn from counted_plans)
),
by_rank as (
    select step, segment_ids, unnest(micro_batches) as batches, unnest(range(len(micro_batches))) as rank from plans
),
by_micro_batch as (
    select step, segment_ids, rank, unnest(batches) as places, unnest(range(len(batches))) as micro_batch from by_rank
),
by_place as (
    select step, segment_ids, rank, micro_batch, unnest(places) as place, unnest(range(len(places))) as position from by_micro_batch
),
planned as (
    select step, segment_ids[place + 1] as segment_id, rank, micro_batch, position from by_place
),
trained as (
    select step, segment_id, rank, micro_batch, position from counted_consumption
    where step in (select step from counted_steps) and (step in (select step from plans) or step not in (select step from events where kind = 'batch_planned'))
),
answer as (
    select
        coalesce(planned.step, trained.step) as step, coalesce(planned.segment_id, trained.segment_id) as segment_id,
        case
            when planned.segment_id is null then 'trained without a plan'
            when trained.segment_id is null then 'planned and left out'
            else 'trained on another place than planned'
        end as fault
    from planned full join trained on planned.step = trained.step and planned.segment_id = trained.segment_id
    where coalesce(planned.step, trained.step) in (select step from counted_steps)
        and (planned.segment_id is null or trained.segment_id is null
            or (planned.rank, planned.micro_batch, planned.position) is distinct from (trained.rank, trained.micro_batch, trained.position))
)
select * from answer
