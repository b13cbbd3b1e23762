-- A wait reached its limit.
create table wait_ended_badly (
    what varchar not null,
    who varchar not null,
    limit_s double not null,
    detail varchar not null
);

comment on column wait_ended_badly.what is 'what was waited for';
comment on column wait_ended_badly.who is 'who waited';
comment on column wait_ended_badly.limit_s is 'the limit in seconds';
comment on column wait_ended_badly.detail is 'what was known';
