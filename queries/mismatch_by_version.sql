-- How far apart are engine and trainer on the tokens of each policy version, by how stale they were when they trained?
-- parameters: none
-- grain: one row per policy version that sampled and lag at training, in versions
with compared as (
    select
        policy_version, trainer_version - policy_version as lag, trainer_logprob::double - behaviour_logprob::double as log_ratio,
        trainer_logprob = behaviour_logprob as is_equal, gate_weight > 0 and advantage <> 0 as is_effective
    from sampled_tokens where is_trainable
),
measured as (
    select
        policy_version, lag, count(*) as n_tokens, -avg(log_ratio) as vllm_kl, avg(exp(least(log_ratio, 20)) - 1 - log_ratio) as k3,
        avg(abs(log_ratio)) as abs_mean, max(abs(log_ratio)) as abs_max,
        quantile_cont(exp(least(log_ratio, 20)), [0.001, 0.01, 0.5, 0.99, 0.999]) as ratio_quantiles,
        avg(is_equal::integer) as bitwise_equal_share, avg(is_effective::integer) as effective_token_share
    from compared group by policy_version, lag
),
answer as (
    select
        policy_version, lag, n_tokens, vllm_kl, k3, abs_mean, abs_max,
        ratio_quantiles[1] as ratio_p001, ratio_quantiles[2] as ratio_p01, ratio_quantiles[3] as ratio_median,
        ratio_quantiles[4] as ratio_p99, ratio_quantiles[5] as ratio_p999, bitwise_equal_share, effective_token_share
    from measured order by policy_version, lag
)
select * from answer
