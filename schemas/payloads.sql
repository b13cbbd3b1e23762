-- One row is one content-addressed blob: routed experts of a segment, an image, processor tensors.
create table payloads (
    lsn bigint not null,
    run varchar not null,
    attempt integer not null,
    producer varchar not null,
    seq bigint not null,
    payload_digest varchar not null,
    kind varchar not null check (kind in ('routing', 'image', 'tensor')),
    size_bytes bigint not null,
    shape integer[] not null,
    dtype varchar not null,
    data blob not null,
    digest blob not null
);

comment on column payloads.lsn is 'place in the one order of the log over all its tables';
comment on column payloads.run is 'name of the run';
comment on column payloads.attempt is 'which start of the run wrote it';
comment on column payloads.producer is 'who sent it to the writer';
comment on column payloads.seq is 'place of its message in the dense order of that producer';
comment on column payloads.payload_digest is 'blake2b-128 hex of kind, shape, dtype and data: its name';
comment on column payloads.kind is 'what the blob holds';
comment on column payloads.size_bytes is 'length of data in bytes';
comment on column payloads.shape is 'shape of the array in data';
comment on column payloads.dtype is 'numpy dtype of the array in data, and +zstd where data is compressed; bytes for an encoded image';
comment on column payloads.data is 'the bytes (Lance blob v2)';
comment on column payloads.digest is 'blake2b-128 over every other column but lsn';
