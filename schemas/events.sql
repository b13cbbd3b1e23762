-- One row is one fact that is not a segment, a score, a consumption or a payload. The columns of each kind stand in schemas/events/<kind>.sql.
create table events (
    lsn bigint not null,
    run varchar not null,
    attempt integer not null,
    producer varchar not null,
    seq bigint not null,
    kind varchar not null,
    happened_at double not null,
    step integer,
    policy_version integer,
    group_id varchar,
    rollout_id varchar,
    segment_id varchar,
    body varchar not null,
    digest blob not null
);

comment on column events.lsn is 'place in the one order of the log over all its tables';
comment on column events.run is 'name of the run';
comment on column events.attempt is 'which start of the run wrote it';
comment on column events.producer is 'who sent it to the writer';
comment on column events.seq is 'place of its message in the dense order of that producer';
comment on column events.kind is 'name of the fact: the name of its file in schemas/events';
comment on column events.happened_at is 'seconds since 1970, UTC';
comment on column events.step is 'optimizer step it belongs to; null when none';
comment on column events.policy_version is 'policy version in force; null when none';
comment on column events.group_id is 'group it speaks of; null when none';
comment on column events.rollout_id is 'rollout it speaks of; null when none';
comment on column events.segment_id is 'segment it speaks of; null when none';
comment on column events.body is 'JSON object with the columns of its kind';
comment on column events.digest is 'blake2b-128 over every other column but lsn';
