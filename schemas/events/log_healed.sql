-- A writer found the newest manifest of a table torn, set it aside and made the lost commit again from its transaction file.
create table log_healed (
    table_name varchar not null,
    version bigint not null,
    quarantined varchar[] not null
);

comment on column log_healed.table_name is 'table of the log';
comment on column log_healed.version is 'newest version that opened';
comment on column log_healed.quarantined is 'manifests that were set aside, by their new names inside the log';
