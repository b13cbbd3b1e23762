-- Which committed rows could a repair of the log not save?
-- parameters: none
-- grain: one row per repair and table
-- empty when all is well
with answer as (
    select table_name, num_rows, lsn_runs, array_to_string(files, ', ') as files, reason from rows_lost
)
select * from answer
