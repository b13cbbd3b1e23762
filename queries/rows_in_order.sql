-- Which places in the one order of the log are empty or held twice, and which rows are of another run or of an attempt that never began?
-- parameters: none
-- grain: one row per gap or place, or per table and attempt
-- empty when all is well
with places as (
    select lsn, run, attempt, 'segments' as table_name from segments
    union all select lsn, run, attempt, 'scores' from scores
    union all select lsn, run, attempt, 'consumption' from consumption
    union all select lsn, run, attempt, 'payloads' from payloads
    union all select lsn, run, attempt, 'events' from events
),
in_order as (
    select lsn, lag(lsn, 1, -1) over (order by lsn) as earlier_lsn from (select distinct lsn from places)
),
gaps as (
    select earlier_lsn + 1 as first_lsn, lsn - 1 as last_lsn from in_order where lsn > earlier_lsn + 1
),
lost as (
    select run[1] as first_lsn, run[2] as last_lsn from (select unnest(from_json(lsn_runs, '[["BIGINT"]]')) as run from rows_lost)
),
covered as (
    select
        gaps.first_lsn, gaps.last_lsn,
        coalesce(sum(least(gaps.last_lsn, lost.last_lsn) - greatest(gaps.first_lsn, lost.first_lsn) + 1) filter (where lost.first_lsn is not null), 0)
            as num_told
    from gaps left join lost on lost.first_lsn <= gaps.last_lsn and lost.last_lsn >= gaps.first_lsn group by gaps.first_lsn, gaps.last_lsn
),
answer as (
    select 'lsn ' || first_lsn || '..' || last_lsn as id, (last_lsn - first_lsn + 1 - num_told)::bigint || ' rows are missing and no repair told so' as fault
    from covered where num_told < last_lsn - first_lsn + 1
    union all
    select 'lsn ' || lsn, count(*) || ' rows' from places group by lsn having count(*) > 1
    union all
    select table_name, 'rows of the runs ' || array_to_string(list(distinct run order by run), ', ') from places
    where (select count(distinct run) from places) > 1 group by table_name
    union all
    select table_name || ' of attempt ' || attempt, count(*) || ' rows, and the attempt never began'
    from places anti join attempts using (attempt) where table_name <> 'events' and table_name <> 'payloads' group by table_name, attempt
)
select * from answer
