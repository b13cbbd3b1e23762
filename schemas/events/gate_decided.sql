-- The importance gate decided on one segment at one step.
create table gate_decided (
    step integer not null,
    segment_id varchar not null,
    level varchar not null,
    mode varchar not null,
    low double,
    high double,
    n_tokens integer not null,
    n_kept integer not null,
    ratio_mean double,
    log_ratio_min double,
    log_ratio_max double
);

comment on column gate_decided.step is 'optimizer step';
comment on column gate_decided.segment_id is 'the segment';
comment on column gate_decided.level is 'off, token, seq or geo';
comment on column gate_decided.mode is 'mask, clip or trunc';
comment on column gate_decided.low is 'lower end of the band; null when open';
comment on column gate_decided.high is 'upper end of the band; null when open';
comment on column gate_decided.n_tokens is 'sampled tokens';
comment on column gate_decided.n_kept is 'tokens with weight above 0';
comment on column gate_decided.ratio_mean is 'mean importance ratio over sampled tokens';
comment on column gate_decided.log_ratio_min is 'smallest log-ratio, nats';
comment on column gate_decided.log_ratio_max is 'largest log-ratio, nats';
