-- A checkpoint is complete on disk.
create table checkpoint_saved (
    step integer not null,
    policy_version integer not null,
    path varchar not null,
    weights_digest varchar not null,
    cursor bigint not null,
    lsn_end bigint not null
);

comment on column checkpoint_saved.step is 'steps trained';
comment on column checkpoint_saved.policy_version is 'version of the weights';
comment on column checkpoint_saved.path is 'folder, relative to the run';
comment on column checkpoint_saved.weights_digest is 'digest of the weights';
comment on column checkpoint_saved.cursor is 'largest lsn of segments taken in';
comment on column checkpoint_saved.lsn_end is 'largest lsn that the checkpoint builds on';
