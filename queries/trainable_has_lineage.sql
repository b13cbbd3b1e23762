-- Which trainable tokens lack a finite log-prob or the policy version that sampled them?
-- parameters: none
-- grain: one row per segment and fault, with the first position and the number of tokens
-- empty when all is well
with trainable as (
    select tokens.*, segments.logprobs_mode from tokens join segments using (lsn, segment_id)
    where is_trainable and tokens.purpose <> 'sft'
),
faults as (
    select segment_id, position, 'no behaviour log-prob' as fault from trainable where behaviour_logprob is null
    union all
    select segment_id, position, 'behaviour log-prob is not finite' from trainable where not isfinite(behaviour_logprob)
    union all
    select segment_id, position, 'no policy version' from trainable where policy_version is null
    union all
    select segment_id, position, 'log-prob is not of the distribution that was sampled from' from trainable where logprobs_mode <> 'processed'
),
answer as (
    select segment_id, fault, min(position) as first_position, count(*) as num_tokens from faults group by segment_id, fault
)
select * from answer
