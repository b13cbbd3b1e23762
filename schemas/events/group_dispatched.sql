-- A prompt group was sent to rollout.
create table group_dispatched (
    group_id varchar not null,
    epoch integer not null,
    order_index bigint not null,
    prompt_index bigint not null,
    prompt_id varchar not null,
    group_size integer not null,
    members integer[] not null,
    purpose varchar not null
);

comment on column group_dispatched.group_id is 'the group';
comment on column group_dispatched.epoch is 'pass over the prompts';
comment on column group_dispatched.order_index is 'place in the seeded order of the epoch';
comment on column group_dispatched.prompt_index is 'line of the prompt in its data set';
comment on column group_dispatched.prompt_id is 'content digest of the prompt row';
comment on column group_dispatched.group_size is 'rollouts asked for';
comment on column group_dispatched.members is 'members asked for now: all at first, the missing ones after a resume';
comment on column group_dispatched.purpose is 'train or eval';
