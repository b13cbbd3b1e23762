-- Views over the five tables of one cut. The views of the event kinds (attempt_started, step_trained, ...) exist before this file runs.

-- One row per start of the run. A later attempt that resumed at an earlier step trained the steps from void_from on again: theirs count.
create view attempts as
with started as (
    select attempt, min(lsn) as lsn, min(happened_at) as happened_at, coalesce(min(resumed_from_step), 0) as first_step, any_value(config) as config
    from attempt_started group by attempt
)
select
    started.attempt, started.lsn, started.happened_at, started.first_step, started.config,
    (select min(later.first_step) from started as later where later.attempt > started.attempt) as void_from
from started;

-- One row per run of rows whose heavy content was taken out of the log on purpose.
create view emptied as
with runs as (
    select table_name, family, lsn as emptied_lsn, unnest(from_json(lsn_runs, '[["BIGINT"]]')) as run from rows_emptied
)
select table_name, family, emptied_lsn, run[1] as first_lsn, run[2] as last_lsn from runs;

-- One row per segment that still holds its tokens, in the window that a part of a question looks at (molt.audit.questions); else all.
create view full_segments as
select * from segments
where (getvariable('first_segment') is null or lsn between getvariable('first_segment') and getvariable('last_segment'))
    and not exists (select 1 from emptied where table_name = 'segments' and segments.lsn between first_lsn and last_lsn);

-- One row per score that still holds its lists, in that window.
create view full_scores as
select * from scores
where (getvariable('first_score') is null or lsn between getvariable('first_score') and getvariable('last_score'))
    and not exists (select 1 from emptied where table_name = 'scores' and scores.lsn between first_lsn and last_lsn);

-- One row per segment that counts as consumed: the consumption rows of steps that no later attempt trained again.
create view counted_consumption as
select consumption.* from consumption left join attempts using (attempt)
where attempts.void_from is null or consumption.step < attempts.void_from;

-- One row per segment and step that counts: what the trainer computed for it, where the log still holds it.
create view counted_scores as
select full_scores.* from full_scores left join attempts using (attempt)
where attempts.void_from is null or full_scores.step < attempts.void_from;

-- One row per step that counts as trained.
create view counted_steps as
select step_trained.* from step_trained left join attempts using (attempt)
where attempts.void_from is null or step_trained.step < attempts.void_from;

-- One row per step that counts as refused.
create view counted_refusals as
select step_refused.* from step_refused left join attempts using (attempt)
where attempts.void_from is null or step_refused.step < attempts.void_from;

-- One row per segment and step that counts: what the gate decided.
create view counted_gates as
select gate_decided.* from gate_decided left join attempts using (attempt)
where attempts.void_from is null or gate_decided.step < attempts.void_from;

-- One row per step: its newest plan, which a later attempt may train without planning anew.
create view counted_plans as
select * from batch_planned where lsn in (select max(lsn) from events where kind = 'batch_planned' group by step);

-- One row per plan, in the window that a part of a question looks at; else all.
create view shown_plans as
select * from batch_planned
where getvariable('first_plan') is null or lsn between getvariable('first_plan') and getvariable('last_plan');

-- One row per run of tokens of equal lineage.
create view spans as
with unfolded as (
    select lsn, attempt, segment_id, rollout_id, group_id, purpose, unnest(range(len(spans))) as span_index, unnest(spans) as span from segments
)
select
    lsn, attempt, segment_id, rollout_id, group_id, purpose, span_index::integer as span_index,
    (sum(span.len) over (partition by lsn order by span_index) - span.len)::integer as first_position,
    span.len as n_tokens, span.source as source, span.trainable as is_trainable,
    span.policy_version as policy_version, span.kv_version as kv_version, span.turn as turn
from unfolded;

-- One row per token that the log still holds.
create view tokens as
with unfolded as (
    select
        lsn, attempt, segment_id, rollout_id, group_id, purpose,
        unnest(range(len(token_ids))) as position,
        unnest(token_ids) as token_id,
        unnest(behaviour_logprobs) as behaviour_logprob,
        unnest(flatten(list_transform(spans, lambda s: repeat([s], s.len)))) as span
    from full_segments
)
select
    lsn, attempt, segment_id, rollout_id, group_id, purpose, position::integer as position, token_id, behaviour_logprob,
    span.source as source, span.trainable as is_trainable, span.policy_version as policy_version, span.kv_version as kv_version, span.turn as turn
from unfolded;

-- One row per sampled token of a scored segment at a step that counts.
create view sampled_tokens as
with marked as (
    select
        counted_scores.attempt, counted_scores.step, counted_scores.policy_version as trainer_version, counted_scores.rank,
        counted_scores.trainer_logprobs, counted_scores.reference_logprobs, counted_scores.advantages, counted_scores.gate_weights,
        full_segments.segment_id, full_segments.rollout_id, full_segments.group_id, full_segments.token_ids, full_segments.behaviour_logprobs,
        flatten(list_transform(full_segments.spans, lambda s: repeat([s], s.len))) as lineage,
        flatten(list_transform(full_segments.spans, lambda s: repeat([s.source = 'policy'], s.len))) as is_sampled
    from counted_scores join full_segments using (segment_id)
),
unfolded as (
    select
        attempt, step, trainer_version, rank, segment_id, rollout_id, group_id,
        unnest(range(len(trainer_logprobs))) as sampled_index,
        unnest(list_where(range(len(token_ids)), is_sampled)) as position,
        unnest(list_where(token_ids, is_sampled)) as token_id,
        unnest(list_where(behaviour_logprobs, is_sampled)) as behaviour_logprob,
        unnest(list_where(lineage, is_sampled)) as span,
        unnest(trainer_logprobs) as trainer_logprob,
        unnest(reference_logprobs) as reference_logprob,
        unnest(advantages) as advantage,
        unnest(gate_weights) as gate_weight
    from marked
)
select
    attempt, step, trainer_version, rank, segment_id, rollout_id, group_id, sampled_index::integer as sampled_index, position::integer as position,
    token_id, behaviour_logprob, trainer_logprob, reference_logprob, advantage, gate_weight,
    span.trainable as is_trainable, span.policy_version as policy_version, span.kv_version as kv_version, span.turn as turn
from unfolded;

-- One row per model call of a segment.
create view turns as
select
    lsn, segment_id, rollout_id, group_id, purpose, turn, min(first_position) as first_position, sum(n_tokens)::integer as n_tokens,
    coalesce(sum(n_tokens) filter (where source = 'policy'), 0)::integer as n_sampled,
    coalesce(sum(n_tokens) filter (where is_trainable), 0)::integer as n_trainable,
    min(policy_version) as version_min, max(policy_version) as version_max
from spans group by lsn, segment_id, rollout_id, group_id, purpose, turn;

-- One row per finished rollout.
create view rollouts as
select
    rollout_id, any_value(group_id) as group_id, any_value(member) as member, any_value(purpose) as purpose, any_value(attempt) as attempt,
    any_value(prompt_index) as prompt_index, any_value(epoch) as epoch, any_value(group_size) as group_size, max(lsn) as lsn,
    count(*) as num_segments, sum(n_tokens)::bigint as n_tokens, sum(n_sampled)::bigint as n_sampled, sum(n_trainable)::bigint as n_trainable,
    sum(num_turns)::bigint as num_turns, any_value(reward) as reward, any_value(outcome) as outcome, bool_or(is_truncated) as is_truncated,
    any_value(stop_reason) as stop_reason, min(version_min) as version_min, max(version_max) as version_max, any_value(engine) as engine,
    min(started_at) as started_at, max(finished_at) as finished_at
from segments group by rollout_id;

-- One row per group: what was asked for, what came, what was decided, where it trained.
create view groups as
with dispatched as (
    select
        group_id, min(lsn) as dispatched_lsn, any_value(purpose) as purpose, any_value(epoch) as epoch, any_value(order_index) as order_index,
        any_value(prompt_index) as prompt_index, any_value(group_size) as group_size
    from group_dispatched group by group_id
),
finished as (
    select
        group_id, count(*) as num_finished, sum(n_sampled)::bigint as n_sampled, avg(reward) as reward_mean, stddev_pop(reward) as reward_std,
        min(version_min) as version_min
    from rollouts group by group_id
),
failed as (
    select group_id, count(distinct member) as num_failed from rollout_failed where is_final group by group_id
),
decided as (
    select group_id, arg_max(decision, lsn) as decision, arg_max(reason, lsn) as reason, arg_max(lag, lsn) as lag from group_decided group by group_id
),
trained as (
    select group_id, min(step) as step from counted_consumption group by group_id
)
select
    dispatched.*, coalesce(finished.num_finished, 0) as num_finished, coalesce(failed.num_failed, 0) as num_failed,
    coalesce(finished.n_sampled, 0) as n_sampled, finished.reward_mean, finished.reward_std, finished.version_min,
    decided.decision, decided.reason, decided.lag, trained.step
from dispatched left join finished using (group_id) left join failed using (group_id)
left join decided using (group_id) left join trained using (group_id);

-- One row per segment and fate found for its sampled tokens; a segment with two rows, or none, breaks the sum.
create view fates as
with refused as (
    select unnest(counted_plans.groups) as group_id, counted_refusals.reason as reason
    from counted_refusals join counted_plans using (step)
),
found as (
    select segment_id, 'trained' as fate, 'step' as reason, n_sampled, n_kept from counted_consumption
    where use_number = 1 and segment_id not in (select segment_id from segments where purpose = 'sft')
    union all
    select segments.segment_id, 'dropped', 'refused: ' || refused.reason, segments.n_sampled, 0
    from segments join refused using (group_id) where segments.purpose = 'train'
    union all
    select segments.segment_id, 'dropped', groups.decision, segments.n_sampled, 0
    from segments join groups using (group_id) where segments.purpose = 'train' and groups.decision <> 'admitted'
    union all
    select segment_id, 'evaluated', 'evaluation', n_sampled, 0 from segments where purpose = 'eval'
)
select * from found
union all
select
    segments.segment_id, 'open',
    case when groups.decision = 'admitted' then 'admitted' when groups.group_id is null then 'no dispatch' else 'not decided' end,
    segments.n_sampled, 0
from segments left join groups using (group_id)
where segments.purpose = 'train' and segments.segment_id not in (select segment_id from found where segment_id is not null);

-- One row per fate and reason: sampled tokens, as the records of whoever decided say. Supervised rows are not generated and not in it.
create view ledger as
with generated as (
    select
        coalesce(sum(n_sampled), 0) + (select coalesce(sum(n_sampled), 0) from rollout_failed) + (select coalesce(sum(n_sampled), 0) from calls_cut)
        as n_tokens, count(*) as num_segments
    from segments where purpose in ('train', 'eval')
),
lines as (
    select 0 as line, 'generated' as fate, '' as reason, n_tokens, num_segments from generated
    union all
    select 1, 'trained', '', coalesce(sum(n_kept), 0), count(*) from fates where fate = 'trained'
    union all
    select 2, 'gated', 'not trainable', sum(segments.n_sampled - segments.n_trainable), count(*)
    from fates join segments using (segment_id) where fates.fate = 'trained' and segments.n_sampled > segments.n_trainable having count(*) > 0
    union all
    select 2, 'gated', 'outside the band', sum(fates.n_sampled - fates.n_kept - (segments.n_sampled - segments.n_trainable)), count(*)
    from fates join segments using (segment_id)
    where fates.fate = 'trained' and fates.n_sampled - fates.n_kept <> segments.n_sampled - segments.n_trainable having count(*) > 0
    union all
    select 3, 'dropped', reason, sum(n_sampled), count(*) from fates where fate = 'dropped' group by reason
    union all
    select 4, 'failed', reason, sum(n_sampled), count(*) from rollout_failed group by reason
    union all
    select 4, 'failed', 'call cut', sum(n_sampled), count(*) from calls_cut having count(*) > 0
    union all
    select 5, 'evaluated', '', sum(n_sampled), count(*) from fates where fate = 'evaluated' having count(*) > 0
    union all
    select 6, 'open', reason, sum(n_sampled), count(*) from fates where fate = 'open' group by reason
)
select line, fate, reason, n_tokens::bigint as n_tokens, num_segments::bigint as num_segments from lines order by line, reason;
