-- One optimizer step was made.
create table step_trained (
    step integer not null,
    policy_version integer not null,
    loss double not null,
    grad_norm double not null,
    learning_rate double not null,
    n_sampled bigint not null,
    n_kept bigint not null,
    reward_mean double,
    kl_mean double,
    entropy_mean double,
    batch_digest varchar not null,
    loss_digest varchar not null,
    weights_digest varchar,
    metrics varchar not null,
    train_s double not null,
    log_s double not null,
    wait_s double not null
);

comment on column step_trained.step is 'optimizer step';
comment on column step_trained.policy_version is 'version of the weights at step start';
comment on column step_trained.loss is 'loss over the whole batch';
comment on column step_trained.grad_norm is 'gradient norm before clipping';
comment on column step_trained.learning_rate is 'learning rate of the step';
comment on column step_trained.n_sampled is 'denominator: sampled tokens of the batch';
comment on column step_trained.n_kept is 'sampled tokens that the gate kept';
comment on column step_trained.reward_mean is 'mean reward over rollouts of the batch';
comment on column step_trained.kl_mean is 'mean k3 divergence trainer to engine per sampled token, nats';
comment on column step_trained.entropy_mean is 'mean entropy per sampled token, nats; null when not computed';
comment on column step_trained.batch_digest is 'blake2b-128 hex over ids, masks and advantages of the batch';
comment on column step_trained.loss_digest is 'blake2b-128 hex over the float32 loss of each micro-batch and rank';
comment on column step_trained.weights_digest is 'digest of the weights after the step; null when not computed';
comment on column step_trained.metrics is 'JSON object of further numbers';
comment on column step_trained.train_s is 'seconds in the step';
comment on column step_trained.log_s is 'seconds that the step stood still for the log: for the ack of its plan, for rows, and for the acks of what the step before wrote';
comment on column step_trained.wait_s is 'seconds waited for rollouts';
