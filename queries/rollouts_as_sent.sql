-- Which finished rollouts are of another prompt, place or group than was sent, were sampled otherwise than was set, or by another tokenizer?
-- parameters: none
-- grain: one row per segment, or per attempt
-- empty when all is well
with sent as (
    select
        group_id, arg_min(purpose, lsn) as purpose, arg_min(prompt_id, lsn) as prompt_id, arg_min(prompt_index, lsn) as prompt_index,
        arg_min(epoch, lsn) as epoch, arg_min(group_size, lsn) as group_size, flatten(list(members)) as members
    from group_dispatched group by group_id
),
sampling as (
    select
        attempt, (config->>'$.rollout.temperature')::float as temperature, (config->>'$.rollout.top_p')::float as top_p,
        (config->>'$.rollout.top_k')::integer as top_k
    from attempts
),
compared as (
    select
        segment_id,
        list_filter([
            case when segments.purpose <> sent.purpose then 'purpose' end,
            case when segments.prompt_id <> sent.prompt_id then 'prompt_id' end,
            case when segments.prompt_index <> sent.prompt_index then 'prompt_index' end,
            case when segments.epoch <> sent.epoch then 'epoch' end,
            case when segments.group_size <> sent.group_size then 'group_size' end,
            case when not list_contains(sent.members, segments.member) then 'member' end,
            case when not starts_with(segments.rollout_id, segments.group_id || '/' || segments.member || '/') then 'rollout_id' end,
            case when segments.segment_id <> segments.rollout_id || '/' || segments.segment_index then 'segment_id' end,
            case when segments.purpose = 'train' and segments.temperature::float <> sampling.temperature then 'temperature' end,
            case when segments.purpose = 'train' and segments.top_p::float <> sampling.top_p then 'top_p' end,
            case when segments.purpose = 'train' and segments.top_k <> sampling.top_k then 'top_k' end
        ], lambda name: name is not null) as differing
    from segments join sent using (group_id) left join sampling using (attempt) where segments.purpose <> 'sft'
),
ids_by as (
    select attempt, count(distinct tokenizer_digest) as num_tokenizers, count(distinct template_digest) as num_templates
    from segments where purpose <> 'sft' group by attempt
),
answer as (
    select segment_id as id, 'not as sent or set: ' || array_to_string(differing, ', ') as fault from compared where len(differing) > 0
    union all
    select 'attempt ' || attempt, num_tokenizers || ' tokenizers and ' || num_templates || ' chat templates'
    from ids_by where num_tokenizers > 1 or num_templates > 1
)
select * from answer
