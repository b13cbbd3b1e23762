-- What took long: waits that reached their limit, and refits by phase?
-- parameters: none
-- grain: one row per wait or refit, newest first
with answer as (
    select lsn, 'wait' as kind, who, what, limit_s as seconds, detail from wait_ended_badly
    union all
    select
        lsn, 'refit', 'version ' || policy_version, 'pause ' || round(pause_s, 3) || ', transfer ' || round(transfer_s, 3) || ', verify '
        || round(verify_s, 3) || ', resume ' || round(resume_s, 3), pause_s + transfer_s + verify_s + resume_s, num_in_flight || ' requests in flight'
    from weights_refit order by lsn desc
)
select * from answer
