-- The engines took new weights.
create table weights_refit (
    policy_version integer not null,
    step integer not null,
    weights_digest varchar not null,
    engines varchar not null,
    pause_s double not null,
    transfer_s double not null,
    verify_s double not null,
    resume_s double not null,
    size_bytes bigint not null,
    num_in_flight integer not null,
    caches varchar[]
);

comment on column weights_refit.policy_version is 'new version';
comment on column weights_refit.step is 'step that made the weights';
comment on column weights_refit.weights_digest is 'blake2b-128 hex over names and digests of the tensors sent';
comment on column weights_refit.engines is 'JSON object: engine to digest it reported';
comment on column weights_refit.pause_s is 'seconds to pause';
comment on column weights_refit.transfer_s is 'seconds to transfer and load';
comment on column weights_refit.verify_s is 'seconds to compare digests';
comment on column weights_refit.resume_s is 'seconds until calls went on: until the log held the step that made the weights, and the resume itself';
comment on column weights_refit.size_bytes is 'bytes sent';
comment on column weights_refit.num_in_flight is 'requests kept in flight across the refit';
comment on column weights_refit.caches is 'what the engines dropped of what old weights had made: kv (keys and values), images (features of images; kept where the vision tower is frozen)';
