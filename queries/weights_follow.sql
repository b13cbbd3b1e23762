-- Which weights that engines or checkpoints took are not those that the steps before had made, and which version did no engine take?
-- parameters: none
-- grain: one row per refit, checkpoint or version
-- empty when all is well
with begun as (
    select arg_min(model_digest, attempt) as model_digest from attempt_started
),
made as (
    select
        attempts.attempt, step_trained.step, arg_max(step_trained.policy_version, step_trained.attempt) as policy_version,
        arg_max(step_trained.weights_digest is not null, step_trained.attempt) as is_known,
        arg_max(coalesce(step_trained.weights_digest, ''), step_trained.attempt) as weights_digest
    from attempts join step_trained on step_trained.attempt <= attempts.attempt
    where not exists (
        select 1 from attempts as between_them where between_them.attempt > step_trained.attempt and between_them.attempt <= attempts.attempt
            and between_them.first_step <= step_trained.step
    )
    group by attempts.attempt, step_trained.step
),
last_of_version as (
    select
        attempt, policy_version, max(step) as step, arg_max(is_known, step) as is_known, arg_max(weights_digest, step) as weights_digest
    from made group by attempt, policy_version
),
compared as (
    select
        weights_refit.attempt, 'refit to version ' || weights_refit.policy_version as what, weights_refit.weights_digest,
        earlier.step as made_step, earlier.is_known, earlier.weights_digest as made_digest
    from weights_refit asof left join last_of_version as earlier
        on weights_refit.attempt = earlier.attempt and weights_refit.policy_version > earlier.policy_version
    union all
    select
        checkpoint_saved.attempt, 'checkpoint of step ' || checkpoint_saved.step, checkpoint_saved.weights_digest, made.step, made.is_known,
        made.weights_digest
    from checkpoint_saved asof left join made on checkpoint_saved.attempt = made.attempt and checkpoint_saved.step > made.step
),
expected as (
    select
        compared.attempt, what, weights_digest, made_step,
        case when made_step is null then begun.model_digest when is_known then made_digest end as expected_digest
    from compared cross join begun
),
sampled as (
    select distinct attempt, policy_version from spans where policy_version is not null and purpose <> 'sft'
),
given as (
    select attempt, policy_version, max(policy_version) over (partition by attempt) as newest from weights_refit
),
answer as (
    select
        attempt, what,
        coalesce('after step ' || made_step, 'at the beginning') || ' the weights were ' || expected_digest || ', not ' || weights_digest as fault
    from expected where expected_digest is not null and weights_digest <> expected_digest
    union all
    select sampled.attempt, 'version ' || sampled.policy_version, 'sampled with, and no refit brought it'
    from sampled anti join given using (attempt, policy_version)
    where sampled.policy_version < (select max(newest) from given where given.attempt = sampled.attempt)
)
select * from answer
