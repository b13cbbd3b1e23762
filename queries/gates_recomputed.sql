-- Where does the gate, computed again from stored log-probs, differ from the recorded decision or weight?
-- parameters: tolerance = 1e-5
-- grain: one row per segment and step
-- empty when all is well
-- asked in parts
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
            when compares = 'kl' then case level when 'seq' then 0.005 else 0.05 end
            when compares = 'tv' then case level when 'seq' then 0.05 else 0.15 end else default_bands.high
        end as mismatch_high
    from gate_decided left join settings using (attempt) left join default_bands using (level, mode)
),
bounds as (
    select
        * exclude (low, high, mismatch_low, mismatch_high),
        case when compares <> 'ratio' then low when low > 0 then ln(low) when low = 0 then '-infinity'::double end as low,
        case when compares <> 'ratio' then high else ln(high) end as high,
        case when compares <> 'ratio' then mismatch_low when mismatch_low > 0 then ln(mismatch_low) when mismatch_low = 0 then '-infinity'::double end
            as mismatch_low,
        case when compares <> 'ratio' then mismatch_high else ln(mismatch_high) end as mismatch_high
    from decisions
),
sampled as (
    select
        bounds.*, counted_scores.trainer_logprobs, counted_scores.gate_weights,
        list_where(behaviour_logprobs, flatten(list_transform(spans, lambda s: repeat([s.source = 'policy'], s.len)))) as behaviour,
        list_filter(spans, lambda s: s.source = 'policy') as parts, counted_scores.policy_version as trainer_version
    from counted_scores join bounds using (attempt, step, segment_id) join full_segments using (segment_id)
),
ratios as (
    select
        *, flatten(list_transform(parts, lambda s: repeat([s.trainable], s.len))) as is_trainable,
        flatten(list_transform(parts, lambda s: repeat([is_decoupled and s.policy_version = trainer_version], s.len))) as is_mismatch,
        list_transform(list_zip(trainer_logprobs, behaviour), lambda t: t[1]::double - t[2]::double) as own,
        list_transform(list_zip(trainer_logprobs, behaviour), lambda t: struct_pack(p := exp(least(t[2]::double, 0)), q := exp(least(t[1]::double, 0))))
            as chances
    from sampled
),
measured as (
    select
        *,
        case compares
            when 'ratio' then own
            when 'tv' then list_transform(chances, lambda c: abs(c.p - c.q))
            else list_transform(chances, lambda c: greatest(0, c.p * (ln(c.p) - ln(c.q))
                + case when c.p < 1 then (1 - c.p) * (ln(1 - c.p) - ln(greatest(1 - c.q, 2.2250738585072014e-308))) else 0 end))
        end as measure,
        list_transform(list_zip(is_trainable, is_mismatch), lambda t: t[1] and t[2]) as in_mismatch,
        list_transform(list_zip(is_trainable, is_mismatch), lambda t: t[1] and not t[2]) as in_rest
    from ratios
),
totals as (
    select
        *,
        coalesce(case
            when level in ('off', 'token') then 0 when level = 'seq' and compares = 'ratio' then list_sum(list_where(measure, in_mismatch))
            else list_avg(list_where(measure, in_mismatch)) end, 0) as of_mismatch,
        coalesce(case
            when level in ('off', 'token') then 0 when level = 'seq' and compares = 'ratio' then list_sum(list_where(measure, in_rest))
            else list_avg(list_where(measure, in_rest)) end, 0) as of_rest
    from measured
),
compared as (
    select
        *, level in ('seq', 'geo') as is_shared,
        of_mismatch between coalesce(mismatch_low, of_mismatch) and coalesce(mismatch_high, of_mismatch)
            and of_rest between coalesce(low, of_rest) and coalesce(high, of_rest) as shared_fits,
        least(
            abs(of_mismatch - coalesce(mismatch_low, '-infinity'::double)), abs(of_mismatch - coalesce(mismatch_high, 'infinity'::double)),
            abs(of_rest - coalesce(low, '-infinity'::double)), abs(of_rest - coalesce(high, 'infinity'::double))) as shared_distance,
        case mode when 'mask' then of_mismatch when 'clip' then least(greatest(of_mismatch, coalesce(mismatch_low, of_mismatch)), coalesce(mismatch_high, of_mismatch))
            else least(of_mismatch, coalesce(mismatch_high, of_mismatch)) end as bounded_mismatch,
        case mode when 'mask' then of_rest when 'clip' then least(greatest(of_rest, coalesce(low, of_rest)), coalesce(high, of_rest))
            else least(of_rest, coalesce(high, of_rest)) end as bounded_rest,
        list_transform(is_mismatch, lambda x: case when x then mismatch_low else low end) as lows,
        list_transform(is_mismatch, lambda x: case when x then mismatch_high else high end) as highs
    from totals
),
decided as (
    select
        *, exp(least(greatest(bounded_mismatch, -20), 20)) * exp(least(greatest(bounded_rest, -20), 20)) as shared_weight,
        list_transform(list_zip(measure, lows, highs, is_trainable), lambda t: t[4] and (level = 'off' or mode <> 'mask' or case
            when is_shared then shared_fits else t[1] >= coalesce(t[2], t[1]) and t[1] <= coalesce(t[3], t[1]) end)) as is_kept,
        list_transform(list_zip(measure, lows, highs), lambda t: level <> 'off' and mode = 'mask' and case
            when is_shared then shared_distance
            else least(abs(t[1] - coalesce(t[2], '-infinity'::double)), abs(t[1] - coalesce(t[3], 'infinity'::double))) end < 1e-9) as is_on_edge
    from compared
),
weighed as (
    select
        *, list_transform(list_zip(measure, own, lows, highs, is_kept), lambda t: case
            when not t[5] then 0
            when level = 'off' then 1
            when is_shared and not (mode = 'mask' and (compares <> 'ratio' or level = 'geo')) then shared_weight
            else exp(least(greatest(case
                when mode = 'mask' then t[2]
                when mode = 'clip' then least(greatest(t[1], coalesce(t[3], t[1])), coalesce(t[4], t[1]))
                else least(t[1], coalesce(t[4], t[1]))
            end, -20), 20))
        end) as weights
    from decided
),
per_segment as (
    select
        attempt, step, segment_id, n_tokens, n_kept, len(trainer_logprobs) as n_tokens_again, len(list_filter(is_kept, lambda x: x)) as n_kept_again,
        len(list_filter(is_on_edge, lambda x: x)) as num_on_edge,
        list_transform(list_zip(weights, gate_weights, is_on_edge), lambda t: case when t[3] then 0 else abs(t[1] - t[2]) / greatest(t[1], 1) end)
            as differences
    from weighed
),
undecided as (
    select attempt, step, segment_id from counted_consumption where n_sampled > 0 and segment_id in (select segment_id from segments where purpose = 'train')
    except
    select attempt, step, segment_id from gate_decided
),
answer as (
    select attempt, step, segment_id, n_kept, n_kept_again, list_max(differences) as largest_difference, 'the decision differs' as fault
    from per_segment
    where n_tokens <> n_tokens_again or abs(n_kept - n_kept_again) > num_on_edge
        or len(list_filter(differences, lambda x: x is null or not x <= $tolerance)) > 0
    union all
    select attempt, step, segment_id, null, null, null, 'no decision was recorded' from undecided
)
select * from answer
