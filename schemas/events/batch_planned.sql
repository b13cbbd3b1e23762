-- The plan of one step, before anyone trains.
create table batch_planned (
    step integer not null,
    policy_version integer not null,
    plan varchar not null,
    plan_digest varchar not null,
    groups varchar[] not null,
    num_segments integer not null,
    num_rollouts integer not null,
    n_sampled bigint not null,
    seed bigint not null,
    cursor bigint not null,
    generation varchar
);

comment on column batch_planned.step is 'optimizer step';
comment on column batch_planned.policy_version is 'version of the weights at step start';
comment on column batch_planned.plan is 'JSON: ranks, micro-batches, segment ids, weights';
comment on column batch_planned.plan_digest is 'blake2b-128 hex of plan';
comment on column batch_planned.groups is 'groups in the batch';
comment on column batch_planned.num_segments is 'segments in the batch';
comment on column batch_planned.num_rollouts is 'rollouts in the batch';
comment on column batch_planned.n_sampled is 'sampled tokens: the token-mean denominator';
comment on column batch_planned.seed is 'seed of the step';
comment on column batch_planned.cursor is 'largest lsn of segments taken in';
comment on column batch_planned.generation is 'null; reserved for re-use plans';
