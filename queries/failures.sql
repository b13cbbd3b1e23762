-- Why did rollouts fail, and how many tokens were lost with them?
-- parameters: none
-- grain: one row per reason and error
with answer as (
    select
        reason, error, count(*) as num_tries, count(*) filter (where is_final) as num_final, sum(n_sampled)::bigint as n_sampled,
        any_value(rollout_id) as example
    from rollout_failed group by reason, error order by num_tries desc
)
select * from answer
