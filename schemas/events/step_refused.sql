-- A step was planned and not made: its groups are spent, the weights did not change.
create table step_refused (
    step integer not null,
    reason varchar not null,
    error varchar not null,
    n_sampled bigint not null
);

comment on column step_refused.step is 'optimizer step';
comment on column step_refused.reason is 'non_finite, nothing_kept, lineage';
comment on column step_refused.error is 'what was found, where';
comment on column step_refused.n_sampled is 'sampled tokens of the batch';
