-- A process took the run: everything needed to say what ran.
create table attempt_started (
    config varchar not null,
    config_digest varchar not null,
    code_digest varchar not null,
    agent_digest varchar,
    pipeline varchar,
    packages varchar not null,
    hardware varchar not null,
    seed bigint not null,
    resumed_from_step integer,
    resumed_from_checkpoint varchar,
    model_digest varchar not null,
    num_steps integer not null,
    pid integer not null,
    host varchar not null
);

comment on column attempt_started.config is 'resolved settings as JSON';
comment on column attempt_started.config_digest is 'blake2b-128 hex of config';
comment on column attempt_started.code_digest is 'blake2b-128 hex over the source files of molt, the pipeline, and the file of an estimator that is not built in';
comment on column attempt_started.agent_digest is 'blake2b-128 hex of the agent file; null without one';
comment on column attempt_started.pipeline is 'program that ran: a name in pipelines/, or the path of a copy; null where it did not say';
comment on column attempt_started.packages is 'JSON object: package name to version';
comment on column attempt_started.hardware is 'JSON object: cpu, gpu, memory';
comment on column attempt_started.seed is 'seed of the run';
comment on column attempt_started.resumed_from_step is 'first step that this attempt trains; null for a fresh run';
comment on column attempt_started.resumed_from_checkpoint is 'checkpoint loaded; null for a fresh run';
comment on column attempt_started.model_digest is 'digest of the initial weights';
comment on column attempt_started.num_steps is 'steps that the run is to make: the length of its schedule';
comment on column attempt_started.pid is 'process id of the driver';
comment on column attempt_started.host is 'host name of the driver';
