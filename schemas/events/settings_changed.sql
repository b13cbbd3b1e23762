-- A resumed attempt goes on under other settings, or is made of other code, packages or hardware, than the attempt before it.
create table settings_changed (
    from_step integer not null,
    changed varchar not null,
    is_exact boolean not null,
    num_replanned integer not null
);

comment on column settings_changed.from_step is 'first step that this attempt trains';
comment on column settings_changed.changed is 'JSON object: setting, code_digest, agent_digest, pipeline, packages.NAME, hardware.NAME or environment.NAME to the values before and now; num_steps where the data alone make another number of steps';
comment on column settings_changed.is_exact is 'steps trained again come out bit for bit as before: nothing that their numbers depend on has changed';
comment on column settings_changed.num_replanned is 'batches planned before that are cut anew, for another number of data shards or size of micro-batches';
