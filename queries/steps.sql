-- How did each step go?
-- parameters: none
-- grain: one row per step that counts; lag_mean and lag_max over segments, of their oldest tokens; token_lag_mean over sampled tokens
with lags as (
    select attempt, step, avg(lag) as lag_mean, max(lag) as lag_max from counted_consumption group by attempt, step
),
token_lags as (
    select
        used.attempt, used.step,
        sum(spans.n_tokens * (used.policy_version - spans.policy_version))::double / nullif(sum(spans.n_tokens), 0) as token_lag_mean
    from counted_consumption as used join spans using (segment_id)
    where used.use_number = 1 and spans.policy_version is not null group by used.attempt, used.step
),
answer as (
    select
        step, policy_version, reward_mean, loss, grad_norm, n_sampled, n_kept, 1 - n_kept / nullif(n_sampled, 0) as rejected_share,
        lag_mean, lag_max, token_lag_mean, kl_mean, train_s, log_s, wait_s
    from counted_steps left join lags using (attempt, step) left join token_lags using (attempt, step) order by step
)
select * from answer
