-- Which tokens may train, or carry a log-prob or a weight, although the policy did not sample them?
-- parameters: none
-- grain: one row per segment, or per span, and fault
-- empty when all is well
-- asked in parts
with foreign_spans as (
    select segment_id, first_position as position, 'trainable, but its source is ' || source as fault
    from spans where is_trainable and source <> 'policy' and purpose <> 'sft'
),
masks as (
    select
        segment_id, behaviour_logprobs, flatten(list_transform(spans, lambda s: repeat([s.source <> 'policy'], s.len))) as is_foreign,
        flatten(list_transform(list_filter(spans, lambda s: s.source = 'policy'), lambda s: repeat([not s.trainable], s.len))) as is_held_back
    from full_segments
),
foreign_logprobs as (
    select segment_id, list_where(range(len(is_foreign)), list_transform(behaviour_logprobs, lambda x, i: is_foreign[i] and x is not null)) as positions
    from masks where list_count(list_where(behaviour_logprobs, is_foreign)) > 0
),
foreign_weights as (
    select segment_id, len(list_filter(list_where(gate_weights, is_held_back), lambda x: x <> 0)) as num_weights
    from counted_scores join masks using (segment_id)
),
answer as (
    select * from foreign_spans
    union all
    select segment_id, positions[1], 'a log-prob on a token that was not sampled' from foreign_logprobs
    union all
    select segment_id, null, num_weights || ' gate weights on tokens that may not train' from foreign_weights where num_weights > 0
)
select * from answer
