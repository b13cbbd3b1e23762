-- Does the token sum close: generated = trained + gated + dropped + failed + evaluated + open, each segment with one fate?
-- parameters: none
-- grain: one row for the sum, or one row per segment
-- empty when all is well
with sums as (
    select
        coalesce(sum(n_tokens) filter (where fate = 'generated'), 0) as n_generated,
        coalesce(sum(n_tokens) filter (where fate <> 'generated'), 0) as n_accounted
    from ledger
),
fate_counts as (
    select segment_id, count(*) as num_fates, list(fate || ' ' || coalesce(reason, '') order by fate, reason) as found from fates group by segment_id
),
answer as (
    select 'the sum' as id, n_generated || ' generated, ' || n_accounted || ' accounted for' as fault from sums where n_generated <> n_accounted
    union all
    select segment_id, num_fates || ' fates: ' || array_to_string(found, ', ') from fate_counts where num_fates <> 1
    union all
    select segment_id, 'in the log without a fate' from segments
    where purpose in ('train', 'eval') and segment_id not in (select segment_id from fate_counts where segment_id is not null)
    union all
    select segment_id, 'a fate without a segment' from fate_counts where segment_id not in (select segment_id from segments)
)
select * from answer
