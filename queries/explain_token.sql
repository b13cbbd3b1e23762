-- What is known of one token: who wrote it, under which version, how it was scored, gated and trained?
-- parameters: segment_id = '', position = 0
-- grain: one row per step that used the token, or one row when none did
-- asked in parts
with token as (
    select * from tokens where segment_id = $segment_id and position = $position
),
answer as (
    select
        token.segment_id, token.position, token.token_id, token.source, token.is_trainable, token.turn, token.policy_version, token.kv_version,
        segments.engine, token.behaviour_logprob, sampled_tokens.step, sampled_tokens.trainer_version, sampled_tokens.trainer_logprob,
        exp(sampled_tokens.trainer_logprob - token.behaviour_logprob) as ratio, sampled_tokens.gate_weight, sampled_tokens.advantage, segments.reward
    from token join segments using (lsn, segment_id) left join sampled_tokens using (segment_id, position)
    order by sampled_tokens.step
)
select * from answer
