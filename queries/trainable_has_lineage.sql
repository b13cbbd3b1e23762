-- Which trainable tokens lack a finite log-prob or the policy version that sampled them?
-- parameters: none
-- grain: one row per segment and fault, with the number of tokens
-- empty when all is well
-- asked in parts
with trainable as (
    select
        segment_id, logprobs_mode, n_trainable,
        list_where(behaviour_logprobs, flatten(list_transform(spans, lambda s: repeat([s.trainable], s.len)))) as logprobs,
        coalesce(list_sum(list_transform(list_filter(spans, lambda s: s.trainable and s.policy_version is null), lambda s: s.len)), 0) as num_unversioned
    from full_segments where purpose <> 'sft'
),
faults as (
    select segment_id, 'no behaviour log-prob' as fault, len(logprobs) - list_count(logprobs) as num_tokens from trainable
    union all
    select segment_id, 'behaviour log-prob is not finite', len(list_filter(logprobs, lambda x: not isfinite(x))) from trainable
    union all
    select segment_id, 'no policy version', num_unversioned from trainable
    union all
    select segment_id, 'log-prob is not of the distribution that was sampled from', n_trainable from trainable where logprobs_mode <> 'processed'
),
answer as (
    select * from faults where num_tokens > 0
)
select * from answer
