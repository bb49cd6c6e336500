-- A named query may be several statements: they run in order, and when the first returns no row, the rest is left out.
-- Rows of all its statements are its result; `move` tells them apart.
-- A queued job's run is always live: cancelling a run ends its waiting jobs in the same unit.

-- name: submit_run
-- Insert a run, its demand classes, jobs and needs, unless the idempotency key was seen.
INSERT INTO runs (id, name, org, status, submitted_by, created_at, jobs_live)
SELECT :run_id, :name, :org, 'running', :submitted_by, COALESCE(:now, now_ms()), json_array_length(:jobs)
WHERE :key IS NULL OR NOT EXISTS (SELECT 1 FROM idempotency_keys WHERE key = :key)
RETURNING 'run' AS move;
INSERT INTO idempotency_keys (key, run_id) SELECT :key, :run_id WHERE :key IS NOT NULL;
INSERT INTO demand_classes (id, key, demand, used_at)
SELECT
    json_extract(value, '$.class_id'),
    json_extract(value, '$.class_key'),
    json_extract(value, '$.demand'),
    COALESCE(:now, now_ms())
FROM json_each(:jobs)
WHERE true
ON CONFLICT (id) DO UPDATE SET used_at = excluded.used_at WHERE used_at <= excluded.used_at - 86400000;
INSERT INTO jobs (
    id, run_id, name, org, status, class_id, is_needed, created_at, queued_at, expires_at,
    agent_id, owner_instance_id, dispatched_at, ack_deadline, scaler, needs, spec, offers
)
SELECT
    json_extract(value, '$.id'),
    :run_id,
    json_extract(value, '$.name'),
    json_extract(value, '$.org'),
    json_extract(value, '$.status'),
    json_extract(value, '$.class_id'),
    json_extract(value, '$.is_needed'),
    COALESCE(:now, now_ms()),
    CASE WHEN json_extract(value, '$.status') <> 'pending' THEN COALESCE(:now, now_ms()) END,
    json_extract(value, '$.expires_at'),
    json_extract(value, '$.agent_id'),
    CASE WHEN json_extract(value, '$.status') = 'dispatched' THEN :instance_id END,
    CASE WHEN json_extract(value, '$.status') = 'dispatched' THEN COALESCE(:now, now_ms()) END,
    CASE WHEN json_extract(value, '$.status') = 'dispatched' THEN COALESCE(:now, now_ms()) + :ack_ms END,
    CASE WHEN json_extract(value, '$.status') = 'dispatched' THEN :scaler END,
    json_extract(value, '$.needs'),
    json_extract(value, '$.spec'),
    json_extract(value, '$.status') = 'dispatched'
FROM json_each(:jobs)
WHERE true
ORDER BY json_extract(value, '$.place')
RETURNING 'job' AS move, *;
INSERT INTO job_needs (need_id, job_id)
SELECT need.value, json_extract(job.value, '$.id')
FROM json_each(:jobs) AS job, json_each(job.value, '$.needs') AS need;

-- name: job
-- One job.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand FROM jobs WHERE id = :job_id;

-- name: jobs_of_run
-- Page of one run's jobs, newest first.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE run_id = :run_id
    AND (:status IS NULL OR status = :status)
    AND (:org IS NULL OR org = :org)
    AND (:before_seq IS NULL OR seq < :before_seq)
ORDER BY seq DESC
LIMIT :limit;

-- name: jobs_by_status
-- Page of the jobs with one status, newest first.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs INDEXED BY jobs_by_status
WHERE status = :status
    AND (:org IS NULL OR org = :org)
    AND seq < COALESCE(:before_seq, 9223372036854775807)
ORDER BY seq DESC
LIMIT :limit;

-- name: jobs_listed
-- Page of all jobs, newest first.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE (:org IS NULL OR org = :org) AND seq < COALESCE(:before_seq, 9223372036854775807)
ORDER BY seq DESC
LIMIT :limit;

-- name: waiting_classes
-- Classes with queued jobs by their oldest, found by hopping from class to class in the queue's index.
WITH RECURSIVE waiting (class_id) AS (
    SELECT min(class_id) FROM jobs INDEXED BY jobs_queue WHERE status = 'queued'
    UNION ALL
    SELECT (
        SELECT min(jobs.class_id) FROM jobs INDEXED BY jobs_queue
        WHERE jobs.status = 'queued' AND jobs.class_id > waiting.class_id
    )
    FROM waiting
    WHERE waiting.class_id IS NOT NULL
),
heads (seq) AS (
    SELECT (
        SELECT min(jobs.seq) FROM jobs INDEXED BY jobs_queue
        WHERE jobs.status = 'queued' AND jobs.class_id = waiting.class_id
    )
    FROM waiting
    WHERE waiting.class_id IS NOT NULL
    ORDER BY 1
    LIMIT :limit
)
SELECT jobs.class_id, jobs.seq, jobs.id, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand
FROM heads JOIN jobs ON jobs.seq = heads.seq
ORDER BY jobs.seq;

-- name: queued_of_class
-- Oldest queued, unexpired jobs of a class; on demand only those that no live spawn is bound to.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs INDEXED BY jobs_queue
WHERE class_id = :class_id
    AND status = 'queued'
    AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
    AND NOT (
        :unserved
        AND EXISTS (
            SELECT 1 FROM scaler_spawning_agents AS spawn
            WHERE spawn.bound_job_id = jobs.id AND spawn.state IN ('booting', 'registered')
        )
    )
ORDER BY seq
LIMIT :limit;

-- name: queued_count
-- How many jobs wait for an agent.
SELECT count(*) AS jobs FROM jobs INDEXED BY jobs_by_status WHERE status = 'queued';

-- name: counts_by_status
-- How many jobs have each status.
SELECT status, count(*) AS jobs FROM jobs INDEXED BY jobs_by_status GROUP BY status;

-- name: claim_oldest
-- Claim the oldest claimable job of the given classes.
UPDATE jobs SET
    status = 'dispatched',
    agent_id = :agent_id,
    owner_instance_id = :instance_id,
    dispatched_at = COALESCE(:now, now_ms()),
    offers = offers + 1,
    ack_deadline = COALESCE(:now, now_ms()) + :ack_ms,
    scaler = :scaler,
    last_provisioning_error = NULL,
    unroutable_since = NULL
WHERE seq = (
    SELECT min(head)
    FROM (
        SELECT (
            SELECT queued.seq
            FROM jobs AS queued INDEXED BY jobs_queue
            WHERE queued.class_id = class.value
                AND queued.status = 'queued'
                AND (queued.expires_at IS NULL OR queued.expires_at > COALESCE(:now, now_ms()))
            ORDER BY queued.seq
            LIMIT 1
        ) AS head
        FROM json_each(:class_ids) AS class
    )
)
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: claim_job
-- Claim one job.
UPDATE jobs SET
    status = 'dispatched',
    agent_id = :agent_id,
    owner_instance_id = :instance_id,
    dispatched_at = COALESCE(:now, now_ms()),
    offers = offers + 1,
    ack_deadline = COALESCE(:now, now_ms()) + :ack_ms,
    scaler = :scaler,
    last_provisioning_error = NULL,
    unroutable_since = NULL
WHERE id = :job_id AND status = 'queued' AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: claim_bound
-- Claim the job that an agent's spawn was made for.
UPDATE jobs SET
    status = 'dispatched',
    agent_id = :agent_id,
    owner_instance_id = :instance_id,
    dispatched_at = COALESCE(:now, now_ms()),
    offers = offers + 1,
    ack_deadline = COALESCE(:now, now_ms()) + :ack_ms,
    scaler = :scaler,
    last_provisioning_error = NULL,
    unroutable_since = NULL
WHERE id = (SELECT bound_job_id FROM scaler_spawning_agents WHERE agent_id = :agent_id AND state = 'registered')
    AND status = 'queued'
    AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: start_job
-- Its agent acknowledged the job; also answers an acknowledgement that was recorded before.
UPDATE jobs SET
    status = 'running',
    started_at = COALESCE(started_at, :now, now_ms()),
    ack_deadline = NULL,
    reason = NULL,
    owner_instance_id = COALESCE(:instance_id, owner_instance_id)
WHERE id = :job_id AND agent_id = :agent_id AND status IN ('dispatched', 'running')
    AND offers = COALESCE(:offer, offers)
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: requeue_job
-- Return an offered job to its place in the queue, while attempts are left.
UPDATE jobs SET
    status = 'queued',
    attempts = attempts + :attempts_add,
    reason = :reason,
    agent_id = NULL,
    owner_instance_id = NULL,
    dispatched_at = NULL,
    ack_deadline = NULL,
    scaler = NULL
WHERE id = :job_id
    AND agent_id = :agent_id
    AND status = 'dispatched'
    AND offers = COALESCE(:offer, offers)
    AND attempts + :attempts_add < :attempts_max
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: offer_again
-- Give the agent of an offered job its time to acknowledge anew.
UPDATE jobs SET ack_deadline = COALESCE(:now, now_ms()) + :ack_ms
WHERE id = :job_id AND agent_id = :agent_id AND status = 'dispatched' AND offers = :offer
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: finish_lone_job
-- End a job that no other job needs, and its run when nothing else is left of it.
UPDATE jobs SET
    status = :status,
    finished_at = COALESCE(:now, now_ms()),
    exit_code = :exit_code,
    signal = :signal,
    reason = COALESCE(:reason, reason),
    attempts = attempts + :attempts_add,
    cancel_requested_at = CASE
        WHEN :status = 'cancelled' THEN COALESCE(cancel_requested_at, :now, now_ms()) ELSE cancel_requested_at
    END,
    ack_deadline = NULL,
    recovery_deadline = NULL,
    unroutable_since = NULL
WHERE id = :job_id
    AND NOT is_needed
    AND status IN (SELECT value FROM json_each(:from_statuses))
    AND (:agent_id IS NULL OR agent_id = :agent_id)
    AND offers = COALESCE(:offer, offers)
    AND (:is_seen IS NULL OR (owner_instance_id IS :seen_owner AND recovery_deadline IS :seen_deadline))
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;
UPDATE runs SET
    jobs_live = jobs_live - 1,
    jobs_cancelled = jobs_cancelled + (:status = 'cancelled'),
    jobs_failed = jobs_failed + (:status NOT IN ('success', 'cancelled')),
    finished_at = CASE WHEN jobs_live = 1 THEN COALESCE(:now, now_ms()) END,
    status = CASE
        WHEN jobs_live > 1 THEN status
        WHEN :status = 'success' AND jobs_cancelled + jobs_failed = 0 THEN 'success'
        WHEN status = 'cancelling' AND (:status = 'cancelled' OR jobs_cancelled > 0) THEN 'cancelled'
        ELSE 'failed'
    END
WHERE id = (SELECT run_id FROM jobs WHERE id = :job_id)
RETURNING jobs_live = 0 AS run_over;

-- name: lock_run_of_job
-- Let one end of a run's jobs at a time look at the others.
SELECT run_id FROM jobs WHERE id = :job_id;

-- name: end_job
-- End a job.  What follows from it, the next queries do.
UPDATE jobs SET
    status = :status,
    finished_at = COALESCE(:now, now_ms()),
    exit_code = :exit_code,
    signal = :signal,
    reason = COALESCE(:reason, reason),
    attempts = attempts + :attempts_add,
    cancel_requested_at = CASE
        WHEN :status = 'cancelled' THEN COALESCE(cancel_requested_at, :now, now_ms()) ELSE cancel_requested_at
    END,
    ack_deadline = NULL,
    recovery_deadline = NULL,
    unroutable_since = NULL
WHERE id = :job_id
    AND status IN (SELECT value FROM json_each(:from_statuses))
    AND (:agent_id IS NULL OR agent_id = :agent_id)
    AND offers = COALESCE(:offer, offers)
    AND (:is_seen IS NULL OR (owner_instance_id IS :seen_owner AND recovery_deadline IS :seen_deadline))
    AND (
        :grace_ms IS NULL
        OR (unroutable_since <= COALESCE(:now, now_ms()) - :grace_ms AND last_provisioning_error IS NULL)
    )
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: skip_dependents
-- Skip all that needs a job which ended without success, and all that needs those.
UPDATE jobs SET status = 'skipped', finished_at = COALESCE(:now, now_ms()), reason = :reason
WHERE status = 'pending'
    AND id IN (
        WITH RECURSIVE doomed (job_id) AS (
            SELECT job_needs.job_id
            FROM jobs AS need JOIN job_needs ON job_needs.need_id = need.id
            WHERE need.id = :job_id
                AND need.status IN ('failed', 'cancelled', 'timed_out', 'unroutable', 'skipped')
            UNION
            SELECT job_needs.job_id FROM doomed JOIN job_needs ON job_needs.need_id = doomed.job_id
        )
        SELECT job_id FROM doomed
    )
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: release_dependents
-- Queue what needs a job, if all that it needs has ended with success.
UPDATE jobs SET status = 'queued', queued_at = COALESCE(:now, now_ms())
WHERE status = 'pending'
    AND id IN (
        SELECT dependent.job_id
        FROM job_needs AS dependent
        WHERE dependent.need_id = :job_id
            AND NOT EXISTS (
                SELECT 1 FROM job_needs JOIN jobs AS need ON need.id = job_needs.need_id
                WHERE job_needs.job_id = dependent.job_id AND need.status <> 'success'
            )
    )
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: close_run
-- Count a run's jobs anew, and end it when all are over.
UPDATE runs SET
    jobs_live = counted.live,
    jobs_cancelled = counted.cancelled,
    jobs_failed = counted.failed,
    finished_at = CASE WHEN counted.live = 0 THEN COALESCE(:now, now_ms()) END,
    status = CASE
        WHEN counted.live > 0 THEN status
        WHEN counted.cancelled + counted.failed = 0 THEN 'success'
        WHEN status = 'cancelling' AND counted.cancelled > 0 THEN 'cancelled'
        ELSE 'failed'
    END
FROM (
    SELECT
        run_id,
        count(*) FILTER (WHERE status IN ('pending', 'queued', 'dispatched', 'running', 'recovering', 'cancelling'))
            AS live,
        count(*) FILTER (WHERE status = 'cancelled') AS cancelled,
        count(*) FILTER (WHERE status IN ('failed', 'timed_out', 'unroutable')) AS failed
    FROM jobs
    WHERE run_id = COALESCE(:run_id, (SELECT run_id FROM jobs WHERE id = :job_id))
    GROUP BY run_id
) AS counted
WHERE runs.id = counted.run_id AND runs.finished_at IS NULL
RETURNING jobs_live = 0 AS run_over;

-- name: recover_job
-- The agent of a started job is gone: it may return until the deadline.
UPDATE jobs SET
    status = CASE WHEN status = 'running' THEN 'recovering' ELSE status END,
    recovery_deadline = :deadline
WHERE id = :job_id AND agent_id = :agent_id AND status IN ('running', 'cancelling')
    AND (:is_seen IS NULL OR (owner_instance_id IS :seen_owner AND recovery_deadline IS :seen_deadline))
RETURNING id;

-- name: resume_job
-- The agent of a started job is back, at this instance.
UPDATE jobs SET
    status = CASE WHEN status = 'recovering' THEN 'running' ELSE status END,
    owner_instance_id = :instance_id,
    recovery_deadline = NULL
WHERE id = :job_id AND agent_id = :agent_id AND status IN ('running', 'recovering', 'cancelling')
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: cancel_run
-- A run that is not over is asked to end.
UPDATE runs SET status = 'cancelling', cancel_requested_at = COALESCE(cancel_requested_at, :now, now_ms())
WHERE id = :run_id AND status IN ('running', 'cancelling')
RETURNING id;

-- name: cancel_jobs
-- End the waiting and offered jobs of a run, and mark the started ones.
UPDATE jobs SET
    status = CASE WHEN status IN ('running', 'recovering') THEN 'cancelling' ELSE 'cancelled' END,
    finished_at = CASE WHEN status IN ('running', 'recovering') THEN NULL ELSE COALESCE(:now, now_ms()) END,
    cancel_requested_at = COALESCE(cancel_requested_at, :now, now_ms()),
    reason = :reason,
    ack_deadline = NULL,
    unroutable_since = NULL
WHERE run_id = :run_id AND status IN ('pending', 'queued', 'dispatched', 'running', 'recovering')
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: cancel_started_job
-- Mark a started job as told to stop.
UPDATE jobs SET
    status = 'cancelling',
    cancel_requested_at = COALESCE(cancel_requested_at, :now, now_ms()),
    reason = :reason
WHERE id = :job_id AND status IN ('running', 'recovering')
RETURNING *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand;

-- name: held_jobs
-- Jobs that an agent holds.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs INDEXED BY jobs_held
WHERE agent_id = :agent_id AND status IN ('dispatched', 'running', 'recovering', 'cancelling')
ORDER BY seq;

-- name: jobs_owned_by
-- Held jobs whose claim was made by an instance.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs INDEXED BY jobs_owned
WHERE owner_instance_id = :instance_id AND status IN ('dispatched', 'running', 'recovering', 'cancelling')
ORDER BY seq
LIMIT :limit;

-- name: overdue_acks
-- Offered jobs that nobody acknowledged in time.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs INDEXED BY jobs_ack
WHERE ack_deadline <= COALESCE(:now, now_ms())
ORDER BY ack_deadline, seq
LIMIT :limit;

-- name: overdue_recoveries
-- Started jobs whose agent did not return in time.
SELECT *, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs INDEXED BY jobs_recovery
WHERE recovery_deadline <= COALESCE(:now, now_ms())
ORDER BY recovery_deadline, seq
LIMIT :limit;

-- name: expired_jobs
-- Waiting jobs past their time.
SELECT id, run_id, last_provisioning_error
FROM jobs INDEXED BY jobs_expiry
WHERE status IN ('pending', 'queued') AND expires_at <= COALESCE(:now, now_ms())
ORDER BY expires_at, seq
LIMIT :limit;

-- name: set_provisioning_error
-- Why the last spawn for a queued job failed; such a job is not unroutable.
UPDATE jobs SET last_provisioning_error = :text, unroutable_since = NULL
WHERE id = :job_id AND status = 'queued'
RETURNING id;

-- name: mark_unroutable
-- Stamp queued jobs of a class as seen unroutable.
UPDATE jobs SET unroutable_since = COALESCE(:now, now_ms())
WHERE seq IN (
    SELECT queued.seq
    FROM jobs AS queued INDEXED BY jobs_queue
    WHERE queued.class_id = :class_id
        AND queued.status = 'queued'
        AND queued.unroutable_since IS NULL
        AND queued.last_provisioning_error IS NULL
    ORDER BY queued.seq
    LIMIT :limit
)
RETURNING id;

-- name: clear_unroutable
-- Take the stamps of a class away.
UPDATE jobs SET unroutable_since = NULL
WHERE seq IN (
    SELECT stamped.seq
    FROM jobs AS stamped INDEXED BY jobs_unroutable
    WHERE stamped.class_id = :class_id AND stamped.unroutable_since IS NOT NULL
    ORDER BY stamped.unroutable_since, stamped.seq
    LIMIT :limit
)
RETURNING id;

-- name: unroutable_jobs
-- Queued jobs of a class that were stamped longer ago than the grace, and that no agent is being made for.
SELECT id, run_id
FROM jobs INDEXED BY jobs_unroutable
WHERE class_id = :class_id
    AND unroutable_since <= COALESCE(:now, now_ms()) - :grace_ms
    AND status = 'queued'
    AND last_provisioning_error IS NULL
    AND NOT EXISTS (
        SELECT 1 FROM scaler_spawning_agents AS spawn
        WHERE spawn.bound_job_id = jobs.id AND spawn.state IN ('booting', 'registered')
    )
ORDER BY unroutable_since, seq
LIMIT :limit;

-- name: prune_jobs
-- Delete the runs that ended first, with jobs, needs, output and idempotency keys.
SELECT id FROM jobs
WHERE run_id IN (SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit);
DELETE FROM log_chunks WHERE job_id IN (
    SELECT id FROM jobs
    WHERE run_id IN (SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit)
);
DELETE FROM job_needs WHERE need_id IN (
    SELECT id FROM jobs
    WHERE run_id IN (SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit)
);
DELETE FROM idempotency_keys
WHERE run_id IN (SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit);
DELETE FROM jobs
WHERE run_id IN (SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit);
DELETE FROM runs
WHERE id IN (SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit);

-- name: oldest_jobs
-- Classes of the jobs that were made first.
SELECT class_id, created_at FROM jobs ORDER BY seq LIMIT :limit;

-- name: prune_classes
-- Delete demand classes that were not submitted for long and that no job has any more.
DELETE FROM demand_classes
WHERE id IN (
    SELECT id FROM demand_classes
    WHERE used_at < :used_before AND id NOT IN (SELECT value FROM json_each(:held))
    ORDER BY used_at
    LIMIT :limit
)
RETURNING id;

-- name: ended_jobs
-- Which of the given jobs are over.
SELECT id FROM jobs
WHERE id IN (SELECT value FROM json_each(:job_ids))
    AND status IN ('success', 'failed', 'cancelled', 'timed_out', 'unroutable', 'skipped');
