-- How far apart are engine and trainer on the tokens of each step, and how much of the step is effective?
-- parameters: none
-- grain: one row per step
with compared as (
    select
        step, trainer_version, trainer_logprob::double - behaviour_logprob::double as log_ratio,
        trainer_logprob = behaviour_logprob as is_equal, policy_version = trainer_version as is_current,
        gate_weight > 0 and advantage <> 0 as is_effective
    from sampled_tokens where is_trainable
),
sampled as (select step, sum(n_sampled) as n_sampled from counted_scores group by step),
measured as (
    select
        step, any_value(trainer_version) as trainer_version, count(*) as n_tokens,
        -avg(log_ratio) as vllm_kl,
        avg(exp(least(log_ratio, 20)) - 1 - log_ratio) as k3,
        avg(exp(least(log_ratio, 20)) - 1 - log_ratio) filter (where is_current) as k3_same_version,
        avg(abs(log_ratio)) as abs_mean, max(abs(log_ratio)) as abs_max,
        quantile_cont(exp(least(log_ratio, 20)), [0.001, 0.01, 0.5, 0.99, 0.999]) as ratio_quantiles,
        avg(is_equal::integer) as bitwise_equal_share,
        count(*) filter (where is_effective) as n_effective
    from compared group by step
),
answer as (
    select
        measured.step, trainer_version, n_tokens, vllm_kl, k3, k3_same_version, abs_mean, abs_max,
        ratio_quantiles[1] as ratio_p001, ratio_quantiles[2] as ratio_p01, ratio_quantiles[3] as ratio_median,
        ratio_quantiles[4] as ratio_p99, ratio_quantiles[5] as ratio_p999, bitwise_equal_share,
        n_effective / n_sampled as effective_token_share
    from measured join sampled using (step) order by step
)
select * from answer
