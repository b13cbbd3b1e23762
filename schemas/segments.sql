-- One row is one token-exact segment of a rollout. A rollout opens a new segment wherever its prefix was rewritten.
-- All segments of one finished rollout are committed together: their presence is the fact that the rollout finished.
create table segments (
    lsn bigint not null,
    run varchar not null,
    attempt integer not null,
    producer varchar not null,
    seq bigint not null,
    segment_id varchar not null,
    rollout_id varchar not null,
    group_id varchar not null,
    segment_index integer not null,
    num_segments integer not null,
    member integer not null,
    group_size integer not null,
    prompt_id varchar not null,
    prompt_index bigint not null,
    epoch integer not null,
    purpose varchar not null check (purpose in ('train', 'eval', 'sft')),
    opened_by varchar not null check (opened_by in ('start', 'template', 'compaction', 'fork')),
    token_ids integer[] not null,
    behaviour_logprobs float[] not null,
    spans struct(len integer, source varchar, trainable boolean, policy_version integer, kv_version integer, turn integer)[] not null,
    n_tokens integer not null,
    n_sampled integer not null,
    n_trainable integer not null,
    num_turns integer not null,
    version_min integer,
    version_max integer,
    reward float,
    outcome float,
    is_terminated boolean not null,
    is_truncated boolean not null,
    stop_reason varchar not null,
    metrics varchar not null,
    temperature float not null,
    top_p float not null,
    top_k integer not null,
    logprobs_mode varchar not null check (logprobs_mode in ('processed', 'none')),
    engine varchar not null,
    tokenizer_digest varchar not null,
    template_digest varchar not null,
    routing_digest varchar,
    media struct(name varchar, payload_digest varchar, position integer, len integer)[],
    started_at double not null,
    finished_at double not null,
    digest blob not null,
    check (n_tokens = len(token_ids)),
    check (n_tokens = len(behaviour_logprobs)),
    check (is_terminated or is_truncated)
);

comment on column segments.lsn is 'place in the one order of the log over all its tables';
comment on column segments.run is 'name of the run';
comment on column segments.attempt is 'which start of the run wrote it; 1 is the first';
comment on column segments.producer is 'who sent it to the writer';
comment on column segments.seq is 'place of its message in the dense order of that producer';
comment on column segments.segment_id is 'rollout_id and segment_index, joined by a slash';
comment on column segments.rollout_id is 'group_id, member and try, joined by slashes';
comment on column segments.group_id is 'all rollouts of one prompt in one epoch: e<epoch>-p<prompt_index>';
comment on column segments.segment_index is 'place of the segment in its rollout, from 0';
comment on column segments.num_segments is 'number of segments of the rollout';
comment on column segments.member is 'place of the rollout in its group, from 0';
comment on column segments.group_size is 'number of rollouts that make the group complete';
comment on column segments.prompt_id is 'content digest of the prompt row';
comment on column segments.prompt_index is 'line of the prompt in its data set, from 0';
comment on column segments.epoch is 'pass over the prompts, from 0';
comment on column segments.purpose is 'what the rollout is for';
comment on column segments.opened_by is 'why this segment begins: start of the rollout, template rewrote history, compaction, fork';
comment on column segments.token_ids is 'shape (n_tokens): ids as the engine consumed and produced them';
comment on column segments.behaviour_logprobs is 'shape (n_tokens), nats: processed log-prob of the sampled token; null where not sampled';
comment on column segments.spans is 'runs of tokens of equal lineage, in order; their len sums to n_tokens. source: system, user, tool, observation, template, policy, history, compaction, image, demonstration; versions null where not sampled; kv_version is the oldest version among the attended cache entries';
comment on column segments.n_tokens is 'tokens';
comment on column segments.n_sampled is 'tokens sampled by the policy (source policy)';
comment on column segments.n_trainable is 'tokens that may reach the gradient';
comment on column segments.num_turns is 'model calls in this segment';
comment on column segments.version_min is 'oldest policy version among sampled tokens; null when none was sampled';
comment on column segments.version_max is 'newest policy version among sampled tokens; null when none was sampled';
comment on column segments.reward is 'reward of the whole rollout, the same in each of its segments; null when it could not be scored';
comment on column segments.outcome is 'unshaped outcome (correct or not) that dynamic filtering looks at; null when the agent gave none';
comment on column segments.is_terminated is 'the agent ended the rollout';
comment on column segments.is_truncated is 'a limit ended the rollout';
comment on column segments.stop_reason is 'what ended the rollout: terminated, max_tokens, max_turns, context, images, agent, timeout';
comment on column segments.metrics is 'JSON object of numbers that the agent reported';
comment on column segments.temperature is 'softmax temperature of the sampling distribution';
comment on column segments.top_p is 'nucleus bound of the sampling distribution; 1 is off';
comment on column segments.top_k is 'top-k bound of the sampling distribution; 0 is off';
comment on column segments.logprobs_mode is 'processed: log-probs of the distribution that was sampled from; none: not sampled (supervised rows)';
comment on column segments.engine is 'engine that sampled it';
comment on column segments.tokenizer_digest is 'blake2b-128 hex of the tokenizer files';
comment on column segments.template_digest is 'blake2b-128 hex of the chat template';
comment on column segments.routing_digest is 'payload that holds the routed experts of the segment; null when none were captured';
comment on column segments.media is 'images in the order of their tokens: name (image for its encoded bytes, else what the model calls the tensor that its processor made), the payload, and the tokens that stand for it; of these, the ones of source image each take one feature of it; null without images';
comment on column segments.started_at is 'seconds since 1970, UTC: rollout dispatched';
comment on column segments.finished_at is 'seconds since 1970, UTC: rollout finished';
comment on column segments.digest is 'blake2b-128 over every other column but lsn';

-- What check cannot say (it takes no lambdas): rows of segments that break a rule over their lists, each with the rule's name.
-- One pass for all rules, since every message of a rollout worker is checked before it is sent.
create macro segments_violations(t) as table
    select segment_id, violation
    from (
        select segment_id, unnest([
            case when coalesce(list_sum(list_transform(spans, lambda s: s.len)), 0) <> n_tokens
                then 'spans do not cover the tokens' end,
            case when purpose <> 'sft' and len(list_filter(spans, lambda s: s.trainable and (s.source <> 'policy' or s.policy_version is null))) > 0
                then 'a trainable span is not sampled by the policy' end,
            case when purpose = 'sft' and len(list_filter(spans, lambda s: s.trainable and s.source <> 'demonstration')) > 0
                then 'a trainable span of a supervised row is no demonstration' end,
            case when n_sampled <> coalesce(list_sum(list_transform(list_filter(spans, lambda s: s.source = 'policy'), lambda s: s.len)), 0)
                then 'n_sampled is not the number of policy tokens' end,
            case when len(list_filter(media, lambda m: m.position < 0 or m.len < 1 or m.position + m.len > n_tokens)) > 0
                then 'an image lies outside the tokens' end,
            case when (coalesce(len(media), 0) > 0) <> (len(list_filter(spans, lambda s: s.source = 'image')) > 0)
                then 'image tokens without an image, or an image without image tokens' end
        ]) as violation
        from query_table(t)
    )
    where violation is not null;
