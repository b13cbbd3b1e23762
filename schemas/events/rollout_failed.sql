-- A rollout ended without a usable segment. Never a reward.
create table rollout_failed (
    rollout_id varchar not null,
    group_id varchar not null,
    member integer not null,
    reason varchar not null,
    error varchar not null,
    n_sampled integer not null,
    num_tries integer not null,
    is_final boolean not null
);

comment on column rollout_failed.rollout_id is 'the rollout';
comment on column rollout_failed.group_id is 'its group';
comment on column rollout_failed.member is 'place in its group';
comment on column rollout_failed.reason is 'agent_error, agent_timeout, engine_error, lineage_error, prompt_too_long, attempt_lost, cancelled';
comment on column rollout_failed.error is 'type and text of the error';
comment on column rollout_failed.n_sampled is 'tokens that were sampled and are lost to training; what an engine was sampling when its process died is not known';
comment on column rollout_failed.num_tries is 'tries made so far for this member';
comment on column rollout_failed.is_final is 'true when the member is not tried again';
