-- A repair of the log could not read rows that were committed: they are lost, by name.
create table rows_lost (
    table_name varchar not null,
    lsn_runs varchar not null,
    num_rows bigint not null,
    files varchar[] not null,
    reason varchar not null
);

comment on column rows_lost.table_name is 'table of the log; empty when it is not known';
comment on column rows_lost.lsn_runs is 'JSON list of [first, last]: lsn of the lost rows';
comment on column rows_lost.num_rows is 'lost rows';
comment on column rows_lost.files is 'damaged files, by their names inside the quarantine of the log';
comment on column rows_lost.reason is 'what was found';
