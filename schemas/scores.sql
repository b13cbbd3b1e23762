-- One row is one segment at one step: what the trainer computed for its sampled tokens. Lists run over the sampled tokens in order.
create table scores (
    lsn bigint not null,
    run varchar not null,
    attempt integer not null,
    producer varchar not null,
    seq bigint not null,
    step integer not null,
    policy_version integer not null,
    segment_id varchar not null,
    rank integer not null,
    n_sampled integer not null,
    trainer_logprobs float[] not null,
    reference_logprobs float[],
    teacher_logprobs float[],
    "values" float[],
    advantages float[] not null,
    gate_weights float[] not null,
    digest blob not null,
    check (n_sampled = len(trainer_logprobs)),
    check (n_sampled = len(advantages)),
    check (n_sampled = len(gate_weights))
);

comment on column scores.lsn is 'place in the one order of the log over all its tables';
comment on column scores.run is 'name of the run';
comment on column scores.attempt is 'which start of the run wrote it';
comment on column scores.producer is 'who sent it to the writer';
comment on column scores.seq is 'place of its message in the dense order of that producer';
comment on column scores.step is 'optimizer step, from 0';
comment on column scores.policy_version is 'version of the weights that scored it (number of refits at step start)';
comment on column scores.segment_id is 'the scored segment';
comment on column scores.rank is 'data-parallel rank that scored it';
comment on column scores.n_sampled is 'tokens sampled by the policy';
comment on column scores.trainer_logprobs is 'shape (n_sampled), nats: log-prob under the trainer at step start, same temperature as sampled';
comment on column scores.reference_logprobs is 'shape (n_sampled), nats: log-prob under the frozen reference; null without one';
comment on column scores.teacher_logprobs is 'shape (n_sampled), nats: log-prob under the teacher; null without one';
comment on column scores."values" is 'shape (n_sampled): critic values; null without a critic';
comment on column scores.advantages is 'shape (n_sampled): advantage that entered the loss';
comment on column scores.gate_weights is 'shape (n_sampled): importance weight that multiplied the token loss; 0 where the gate rejected it';
comment on column scores.digest is 'blake2b-128 over every other column but lsn';
