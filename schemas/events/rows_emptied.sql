-- A tombstone: the heavy content of rows was taken out of the log by retention or redaction. Their scalars and digests stay, so every sum still closes.
create table rows_emptied (
    family varchar not null,
    table_name varchar not null,
    rollout_id varchar,
    lsn_runs varchar not null,
    num_rows bigint not null,
    size_bytes bigint not null,
    n_tokens bigint not null,
    n_sampled bigint not null,
    root varchar not null,
    left_root varchar not null,
    reason varchar not null
);

comment on column rows_emptied.family is 'routing, payloads, scores, tokens, or rollout for a redaction';
comment on column rows_emptied.table_name is 'table of the log';
comment on column rows_emptied.rollout_id is 'the redacted rollout; null for retention';
comment on column rows_emptied.lsn_runs is 'JSON list of [first, last]: lsn of the emptied rows';
comment on column rows_emptied.num_rows is 'emptied rows';
comment on column rows_emptied.size_bytes is 'bytes of blobs taken out; 0 for other families';
comment on column rows_emptied.n_tokens is 'tokens of the rows; 0 for payloads and scores';
comment on column rows_emptied.n_sampled is 'sampled tokens of the rows; 0 for payloads';
comment on column rows_emptied.root is 'Merkle root over the digests of the rows as written, in lsn order, hex';
comment on column rows_emptied.left_root is 'Merkle root over the digests of what is left, in lsn order, hex';
comment on column rows_emptied.reason is 'why';
