-- Which steps are absent, told twice, consumed without a word, or under one policy version or rank here and another one there?
-- parameters: none
-- grain: one row per step and fault
-- empty when all is well
with outcomes as (
    select attempt, step, policy_version from step_trained
    union all
    select attempt, step, policy_version from step_refused
),
counted as (
    select attempt, step, policy_version from counted_steps
    union all
    select attempt, step, policy_version from counted_refusals
),
in_order as (
    select
        step, policy_version, lag(step, 1, -1) over (order by step) as earlier_step,
        lag(policy_version, 1, 0) over (order by step) as earlier_version
    from (select step, max(policy_version) as policy_version from counted group by step)
),
planned as (
    select step, policy_version, (plan->>'$.policy_version')::integer as version_inside from counted_plans
),
told_twice as (
    select step, 'attempt ' || attempt || ' tells its outcome ' || count(*) || ' times' as fault
    from outcomes group by attempt, step having count(*) > 1
    union all
    select step, 'attempt ' || attempt || ' plans it ' || count(*) || ' times' from batch_planned group by attempt, step having count(*) > 1
    union all
    select step, 'its outcome counts in ' || count(distinct attempt) || ' attempts' from counted group by step having count(distinct attempt) > 1
    union all
    select step, 'attempt ' || attempt || ' scores ' || segment_id || ' ' || count(*) || ' times'
    from scores group by attempt, step, segment_id having count(*) > 1
    union all
    select step, 'attempt ' || attempt || ' gates ' || segment_id || ' ' || count(*) || ' times'
    from gate_decided group by attempt, step, segment_id having count(*) > 1
),
other_versions as (
    select step, 'planned under version ' || planned.policy_version || ', made under ' || counted.policy_version as fault
    from counted join planned using (step) where planned.policy_version <> counted.policy_version
    union all
    select step, 'its plan is of version ' || version_inside || ', the event says ' || policy_version
    from planned where version_inside is distinct from policy_version
    union all
    select distinct step, 'consumed under version ' || consumption.policy_version || ', made under ' || step_trained.policy_version
    from consumption join step_trained using (attempt, step) where consumption.policy_version <> step_trained.policy_version
    union all
    select distinct step, 'scored under version ' || scores.policy_version || ', made under ' || outcomes.policy_version
    from scores join outcomes using (attempt, step) where scores.policy_version <> outcomes.policy_version
    union all
    select distinct step, 'scored by rank ' || scores.rank || ', consumed as of rank ' || consumption.rank
    from scores join consumption using (attempt, step, segment_id) where scores.rank <> consumption.rank
    union all
    select step, 'policy version falls from ' || earlier_version || ' to ' || policy_version from in_order where policy_version < earlier_version
),
answer as (
    select earlier_step + 1 as step, 'absent: the next one that counts is ' || step as fault from in_order where step <> earlier_step + 1
    union all
    select * from told_twice
    union all
    select distinct consumption.step, 'attempt ' || attempt || ' consumed rows and does not tell of the step'
    from consumption anti join step_trained using (attempt, step)
    union all
    select * from other_versions
)
select * from answer
