-- How did each step go?
-- parameters: none
-- grain: one row per step that counts
with lags as (
    select attempt, step, avg(lag) as lag_mean, max(lag) as lag_max from counted_consumption group by attempt, step
),
answer as (
    select
        step, policy_version, reward_mean, loss, grad_norm, n_sampled, n_kept, 1 - n_kept / nullif(n_sampled, 0) as rejected_share,
        lag_mean, lag_max, kl_mean, train_s, log_s, wait_s
    from counted_steps left join lags using (attempt, step) order by step
)
select * from answer
