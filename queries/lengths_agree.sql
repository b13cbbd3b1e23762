-- Where do lengths that must agree differ: ids, log-probs, spans, counts, scores, gates, consumption?
-- parameters: none
-- grain: one row per pair of lengths that differ
-- empty when all is well
-- asked in parts
with counted as (
    select
        segment_id, n_tokens, n_sampled, n_trainable,
        coalesce(list_sum(list_transform(spans, lambda s: s.len)), 0) as in_spans,
        coalesce(list_sum(list_transform(list_filter(spans, lambda s: s.source = 'policy'), lambda s: s.len)), 0) as sampled_in_spans,
        coalesce(list_sum(list_transform(list_filter(spans, lambda s: s.trainable), lambda s: s.len)), 0) as trainable_in_spans
    from segments
),
differing as (
    select segment_id, 'token_ids' as what, len(token_ids) as found, n_tokens as expected from full_segments
    union all select segment_id, 'behaviour_logprobs', len(behaviour_logprobs), n_tokens from full_segments
    union all select segment_id, 'tokens in spans', in_spans, n_tokens from counted
    union all select segment_id, 'sampled tokens in spans', sampled_in_spans, n_sampled from counted
    union all select segment_id, 'trainable tokens in spans', trainable_in_spans, n_trainable from counted
    union all
    select segment_id, 'trainer_logprobs', len(full_scores.trainer_logprobs), segments.n_sampled from full_scores join segments using (segment_id)
    union all
    select segment_id, 'gate decision', gate_decided.n_tokens, segments.n_sampled from gate_decided join segments using (segment_id)
    union all
    select segment_id, 'kept by the gate', consumption.n_kept, gate_decided.n_kept
    from consumption join gate_decided using (attempt, step, segment_id)
    union all
    select segment_id, 'consumption', consumption.n_sampled, case when purpose = 'sft' then segments.n_trainable else segments.n_sampled end
    from consumption join segments using (segment_id)
),
answer as (
    select * from differing where found is distinct from expected
)
select * from answer
