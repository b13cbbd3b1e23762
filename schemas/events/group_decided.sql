-- Admission decided on a finished group.
create table group_decided (
    group_id varchar not null,
    decision varchar not null,
    reason varchar not null,
    lag integer,
    num_rollouts integer not null,
    num_failed integer not null,
    n_sampled bigint not null,
    reward_mean double,
    reward_std double
);

comment on column group_decided.group_id is 'the group';
comment on column group_decided.decision is 'admitted, stale, filtered, incomplete, failed';
comment on column group_decided.reason is 'why, in words';
comment on column group_decided.lag is 'policy version now minus oldest version in the group';
comment on column group_decided.num_rollouts is 'finished rollouts';
comment on column group_decided.num_failed is 'failed rollouts';
comment on column group_decided.n_sampled is 'sampled tokens in the group';
comment on column group_decided.reward_mean is 'mean reward over scored rollouts';
comment on column group_decided.reward_std is 'population deviation of the reward over scored rollouts';
