-- Where does the gate, computed again from stored log-probs, differ from the recorded decision or weight?
-- parameters: tolerance = 1e-5
-- grain: one row per segment and step
-- empty when all is well
with default_bands as (
    select * from (values
        ('token', 'mask', 0.5, 5.0), ('token', 'clip', 0.5, 5.0), ('token', 'trunc', null, 5.0),
        ('seq', 'mask', 0.5, 2.0), ('seq', 'clip', 0.5, 2.0), ('seq', 'trunc', null, 2.0),
        ('geo', 'mask', 0.999, 1.002), ('geo', 'clip', 0.999, 1.002), ('geo', 'trunc', null, 1.002)
    ) as published (level, mode, low, high)
),
settings as (
    select
        attempt, config->>'$.algo.advantage.gate' as compares, coalesce((config->>'$.algo.advantage.decoupled')::boolean, false) as is_decoupled,
        (config->>'$.algo.advantage.is_mismatch_threshold[0]')::double as low, (config->>'$.algo.advantage.is_mismatch_threshold[1]')::double as high
    from attempts
),
decisions as (
    select
        gate_decided.attempt, gate_decided.step, gate_decided.segment_id, gate_decided.level, gate_decided.mode, gate_decided.n_tokens,
        gate_decided.n_kept, coalesce(settings.compares, 'ratio') as compares, coalesce(settings.is_decoupled, false) as is_decoupled,
        gate_decided.low, gate_decided.high,
        case
            when settings.low is not null or settings.high is not null then settings.low
            when compares <> 'ratio' then null else default_bands.low
        end as mismatch_low,
        case
            when settings.low is not null or settings.high is not null then settings.high
            when compares = 'kl' then 0.05 when compares = 'tv' then 0.2 else default_bands.high
        end as mismatch_high
    from gate_decided left join settings using (attempt) left join default_bands using (level, mode)
),
ratios as (
    select
        sampled_tokens.step, sampled_tokens.segment_id, sampled_index, is_trainable, gate_weight, decisions.* exclude (step, segment_id, low, high),
        is_decoupled and sampled_tokens.policy_version = trainer_version as is_mismatch,
        case when is_mismatch then mismatch_low else low end as low, case when is_mismatch then mismatch_high else high end as high,
        trainer_logprob::double - behaviour_logprob::double as own,
        exp(least(behaviour_logprob::double, 0)) as p, exp(least(trainer_logprob::double, 0)) as q
    from sampled_tokens join decisions on
        decisions.attempt = sampled_tokens.attempt and decisions.step = sampled_tokens.step and decisions.segment_id = sampled_tokens.segment_id
),
measured as (
    select
        *,
        case compares
            when 'ratio' then own
            when 'tv' then abs(p - q)
            else greatest(0, p * -own + case when p < 1 then (1 - p) * (ln(1 - p) - ln(greatest(1 - q, 2.2250738585072014e-308))) else 0 end)
        end as measure,
        case when compares <> 'ratio' then low when low > 0 then ln(low) when low = 0 then '-infinity'::double end as bound_low,
        case when compares <> 'ratio' then high else ln(high) end as bound_high
    from ratios
),
compared as (
    select
        *,
        case level
            when 'seq' then sum(measure) filter (where is_trainable) over part
            when 'geo' then avg(measure) filter (where is_trainable) over part
            else measure
        end as compared
    from measured window part as (partition by attempt, step, segment_id, is_mismatch)
),
decided as (
    select
        *,
        is_trainable and (level = 'off' or mode <> 'mask' or (compared >= coalesce(bound_low, compared) and compared <= coalesce(bound_high, compared)))
            as is_kept,
        level <> 'off' and mode = 'mask' and least(abs(compared - coalesce(bound_low, '-infinity')), abs(compared - coalesce(bound_high, 'infinity'))) < 1e-9
            as is_on_edge,
        case
            when level = 'off' then 0
            when mode = 'mask' then case when compares <> 'ratio' or level = 'geo' then own else compared end
            when mode = 'clip' then least(greatest(compared, coalesce(bound_low, compared)), coalesce(bound_high, compared))
            else least(compared, coalesce(bound_high, compared))
        end as log_weight
    from compared
),
weighed as (
    select *, case when is_kept then exp(least(greatest(log_weight, -20), 20)) else 0 end as weight from decided
),
per_segment as (
    select
        attempt, step, segment_id, any_value(n_tokens) as n_tokens, any_value(n_kept) as n_kept, count(*) as n_tokens_again,
        count(*) filter (where is_kept) as n_kept_again, count(*) filter (where is_on_edge) as num_on_edge,
        max(abs(weight - gate_weight) / greatest(weight, 1)) filter (where not is_on_edge) as largest_difference
    from weighed group by attempt, step, segment_id
),
undecided as (
    select attempt, step, segment_id from counted_consumption where n_sampled > 0 and segment_id in (select segment_id from segments where purpose = 'train')
    except
    select attempt, step, segment_id from gate_decided
),
answer as (
    select attempt, step, segment_id, n_kept, n_kept_again, largest_difference, 'the decision differs' as fault
    from per_segment
    where n_tokens <> n_tokens_again or abs(n_kept - n_kept_again) > num_on_edge or largest_difference > $tolerance or largest_difference is null and num_on_edge = 0
    union all
    select attempt, step, segment_id, null, null, null, 'no decision was recorded' from undecided
)
select * from answer
