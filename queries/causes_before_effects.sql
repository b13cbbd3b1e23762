-- Which facts stand in the log without their cause before them?
-- parameters: none
-- grain: one row per fact
-- empty when all is well
with first_dispatch as (
    select group_id, min(lsn) as lsn from group_dispatched group by group_id
),
first_segment as (
    select segment_id, min(lsn) as lsn from segments group by segment_id
),
first_plan as (
    select step, min(lsn) as lsn from batch_planned group by step
),
first_admission as (
    select group_id, min(lsn) as lsn from group_decided where decision = 'admitted' group by group_id
),
plans_of_groups as (
    select lsn, step, unnest(groups) as group_id from batch_planned
),
first_score as (
    select attempt, step, segment_id, min(lsn) as lsn from scores group by attempt, step, segment_id
),
facts as (
    select 'segment ' || segments.segment_id as fact, 'dispatch of its group' as cause, segments.lsn, first_dispatch.lsn as cause_lsn
    from segments left join first_dispatch using (group_id) where segments.purpose <> 'sft'
    union all
    select 'consumption of ' || consumption.segment_id || ' at step ' || consumption.step, 'its segment', consumption.lsn, first_segment.lsn
    from consumption left join first_segment using (segment_id)
    union all
    select 'consumption of ' || consumption.segment_id || ' at step ' || consumption.step, 'its scores', consumption.lsn, first_score.lsn
    from consumption join segments using (segment_id) left join first_score on
        first_score.attempt = consumption.attempt and first_score.step = consumption.step and first_score.segment_id = consumption.segment_id
    where segments.purpose = 'train'
    union all
    select 'scores of ' || scores.segment_id || ' at step ' || step, 'the plan of the step', scores.lsn, first_plan.lsn
    from scores left join first_plan using (step)
    union all
    select 'plan of group ' || group_id || ' for step ' || step, 'its admission', plans_of_groups.lsn, first_admission.lsn
    from plans_of_groups left join first_admission using (group_id) where group_id in (select group_id from first_dispatch)
    union all
    select 'training of step ' || step, 'the plan of the step', step_trained.lsn, first_plan.lsn from step_trained left join first_plan using (step)
),
answer as (
    select fact, cause, lsn, cause_lsn from facts where cause_lsn is null or cause_lsn >= lsn
)
select * from answer
