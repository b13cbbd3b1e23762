-- Where did every sampled token go?
-- parameters: none
-- grain: one row per fate and reason
with answer as (
    select fate, reason, n_tokens, num_segments from ledger order by line, reason
)
select * from answer
