-- Model calls of a finished rollout were cut, by its time or by its agent: what they sampled stands in none of its segments.
create table calls_cut (
    rollout_id varchar not null,
    group_id varchar not null,
    member integer not null,
    n_sampled integer not null
);

comment on column calls_cut.rollout_id is 'the rollout';
comment on column calls_cut.group_id is 'its group';
comment on column calls_cut.member is 'place in its group';
comment on column calls_cut.n_sampled is 'tokens that were sampled and are lost to training';
