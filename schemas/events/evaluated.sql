-- An evaluation ended.
create table evaluated (
    step integer not null,
    policy_version integer not null,
    dataset varchar not null,
    num_rollouts integer not null,
    num_failed integer not null,
    reward_mean double,
    reward_ci95 double,
    weights_digest varchar not null,
    loss_mean double,
    num_unscored integer
);

comment on column evaluated.step is 'steps trained';
comment on column evaluated.policy_version is 'version that was evaluated';
comment on column evaluated.dataset is 'evaluation prompts';
comment on column evaluated.num_rollouts is 'scored rollouts';
comment on column evaluated.num_failed is 'failed rollouts';
comment on column evaluated.reward_mean is 'mean reward';
comment on column evaluated.reward_ci95 is 'half width of the 95 % interval of the mean';
comment on column evaluated.weights_digest is 'digest of the evaluated weights';
comment on column evaluated.loss_mean is 'mean negative log-prob per target token, nats; null when not a supervised evaluation';
comment on column evaluated.num_unscored is 'finished rollouts that could not be scored; they are not in the mean';
