-- An attempt ended: finished, drained, failed or found dead by its successor.
create table attempt_ended (
    reason varchar not null,
    error varchar,
    num_steps integer not null
);

comment on column attempt_ended.reason is 'finished, drained, failed or lost';
comment on column attempt_ended.error is 'text of the error; null when none';
comment on column attempt_ended.num_steps is 'steps trained by this attempt';
