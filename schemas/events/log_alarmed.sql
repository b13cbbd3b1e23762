-- Upkeep of the log did not hold one of its bounds.
create table log_alarmed (
    table_name varchar not null,
    what varchar not null,
    value double not null,
    bound double not null
);

comment on column log_alarmed.table_name is 'table of the log';
comment on column log_alarmed.what is 'what is out of bounds: manifest share, live fragments';
comment on column log_alarmed.value is 'value found';
comment on column log_alarmed.bound is 'its bound';
