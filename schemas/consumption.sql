-- One row is one segment consumed at one step of one attempt. The trainer's cursor travels in the same commit.
create table consumption (
    lsn bigint not null,
    run varchar not null,
    attempt integer not null,
    producer varchar not null,
    seq bigint not null,
    step integer not null,
    segment_id varchar not null,
    rollout_id varchar not null,
    group_id varchar not null,
    policy_version integer not null,
    rank integer not null,
    micro_batch integer not null,
    position integer not null,
    use_number integer not null,
    n_sampled integer not null,
    n_kept integer not null,
    lag integer,
    cursor bigint not null,
    digest blob not null,
    check (n_kept <= n_sampled)
);

comment on column consumption.lsn is 'place in the one order of the log over all its tables';
comment on column consumption.run is 'name of the run';
comment on column consumption.attempt is 'which start of the run wrote it';
comment on column consumption.producer is 'who sent it to the writer';
comment on column consumption.seq is 'place of its message in the dense order of that producer';
comment on column consumption.step is 'optimizer step, from 0';
comment on column consumption.segment_id is 'the consumed segment';
comment on column consumption.rollout_id is 'its rollout';
comment on column consumption.group_id is 'its group';
comment on column consumption.policy_version is 'version of the weights at step start';
comment on column consumption.rank is 'data-parallel rank';
comment on column consumption.micro_batch is 'micro-batch on that rank, from 0';
comment on column consumption.position is 'place in the micro-batch, from 0';
comment on column consumption.use_number is '1 for the first use of the segment in training, 2 for a declared second one';
comment on column consumption.n_sampled is 'tokens sampled by the policy';
comment on column consumption.n_kept is 'sampled tokens that the gate kept';
comment on column consumption.lag is 'policy_version minus version_min of the segment; null when nothing was sampled';
comment on column consumption.cursor is 'largest lsn of segments that the trainer has taken in';
comment on column consumption.digest is 'blake2b-128 over every other column but lsn';
