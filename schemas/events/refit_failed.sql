-- New weights did not arrive as sent; the old version keeps serving.
create table refit_failed (
    policy_version integer not null,
    step integer not null,
    engine varchar not null,
    error varchar not null
);

comment on column refit_failed.policy_version is 'version that was refused';
comment on column refit_failed.step is 'step that made the weights';
comment on column refit_failed.engine is 'engine that failed';
comment on column refit_failed.error is 'what differs';
