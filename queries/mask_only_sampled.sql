-- Which tokens may train, or carry a log-prob or a weight, although the policy did not sample them?
-- parameters: none
-- grain: one row per segment, or per span, and fault
-- empty when all is well
with foreign_spans as (
    select segment_id, first_position as position, 'trainable, but its source is ' || source as fault
    from spans where is_trainable and source <> 'policy'
),
foreign_logprobs as (
    select segment_id, min(position) as position, 'a log-prob on a token that was not sampled' as fault
    from tokens where source <> 'policy' and behaviour_logprob is not null group by segment_id
),
foreign_weights as (
    select segment_id, min(position) as position, 'a gate weight on a token that may not train' as fault
    from sampled_tokens where not is_trainable and gate_weight <> 0 group by segment_id
),
answer as (
    select * from foreign_spans union all select * from foreign_logprobs union all select * from foreign_weights
)
select * from answer
