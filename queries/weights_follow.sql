-- Which weights that engines or checkpoints took are not those that the steps before had made, and which version did no engine take?
-- parameters: none
-- grain: one row per refit, checkpoint or version
-- empty when all is well
with begun as (
    select arg_min(model_digest, attempt) as model_digest from attempt_started
),
made as (
    select attempts.attempt, step_trained.step, arg_max(step_trained.weights_digest is not null, step_trained.attempt) as is_known,
        arg_max(coalesce(step_trained.weights_digest, ''), step_trained.attempt) as weights_digest
    from attempts join step_trained on step_trained.attempt <= attempts.attempt
    where not exists (
        select 1 from attempts as between_them where between_them.attempt > step_trained.attempt and between_them.attempt <= attempts.attempt
            and between_them.first_step <= step_trained.step
    )
    group by attempts.attempt, step_trained.step
),
taken as (
    select attempt, step, weights_digest, 'refit to version ' || policy_version as what from weights_refit
    union all
    select attempt, step - 1, weights_digest, 'checkpoint of step ' || step from checkpoint_saved
),
compared as (
    select
        taken.attempt, what, taken.weights_digest, made.step as made_step,
        case when made.step is null then begun.model_digest when is_known then made.weights_digest end as expected
    from taken asof left join made on taken.attempt = made.attempt and taken.step >= made.step cross join begun
),
sampled as (
    select distinct attempt, policy_version from spans where policy_version is not null and purpose <> 'sft'
),
given as (
    select attempt, policy_version, max(policy_version) over (partition by attempt) as newest from weights_refit
),
answer as (
    select attempt, what, coalesce('after step ' || made_step, 'at the beginning') || ' the weights were ' || expected || ', not ' || weights_digest as fault
    from compared where expected is not null and weights_digest <> expected
    union all
    select sampled.attempt, 'version ' || sampled.policy_version, 'sampled with, and no refit brought it'
    from sampled anti join given using (attempt, policy_version)
    where sampled.policy_version < (select max(newest) from given where given.attempt = sampled.attempt)
)
select * from answer
