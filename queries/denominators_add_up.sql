-- In which steps do the recorded token counts differ from the sum over what was consumed or planned?
-- parameters: none
-- grain: one row per attempt, step and count
-- empty when all is well
with consumed as (
    select attempt, step, sum(n_sampled) as n_sampled, sum(n_kept) as n_kept, count(*) as num_segments from consumption group by attempt, step
),
planned as (
    select step, n_sampled, num_segments from counted_plans
),
compared as (
    select attempt, step, 'n_sampled of the step' as what, step_trained.n_sampled as found, consumed.n_sampled as expected
    from step_trained left join consumed using (attempt, step)
    union all
    select attempt, step, 'n_kept of the step', step_trained.n_kept, consumed.n_kept from step_trained left join consumed using (attempt, step)
    union all
    select attempt, step, 'n_sampled of the plan', planned.n_sampled, counted_steps.n_sampled from counted_steps join planned using (step)
    union all
    select attempt, step, 'num_segments of the plan', planned.num_segments, consumed.num_segments
    from counted_steps join planned using (step) left join consumed using (attempt, step)
),
answer as (
    select * from compared where found is distinct from expected
)
select * from answer
