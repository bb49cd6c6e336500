-- Each query is one statement.  Locks are taken in one order: a run before its jobs, runs in the order of their ids.
-- A statement that had to wait for a row goes on with that row as it is then, while all else is as of its start; a joined
-- row (IN (SELECT ...) is a join, too) is the one that matched at first.  So guards with several values are
-- = ANY (ARRAY(...)), counts that must be right are columns of the locked row or read by a later statement, and results of
-- parts that change rows are used by joins only, since sub-selects would be run again.
-- Plans are made once for each connection, maybe while the tables are empty, and must be right when they are full.  So
-- no statement leaves the planner a choice: a move finds its row by a unique key and compares status || '', which no index
-- has; a list says BETWEEN x AND x and the full order of its index, which no other index gives; and what would be a join
-- of two tables is a sub-select or LATERAL, which cannot be turned around.
-- A queued job's run is always live: cancelling a run ends its waiting jobs in the same unit.

-- name: submit_run
-- Insert a run, its demand classes, jobs and needs, unless the idempotency key was seen.
WITH keyed AS (
    INSERT INTO idempotency_keys (key, run_id)
    SELECT :key::TEXT, :run_id::TEXT
    WHERE :key::TEXT IS NOT NULL
    ON CONFLICT (key) DO NOTHING
    RETURNING run_id
),
fresh AS (
    SELECT :run_id::TEXT AS run_id WHERE :key::TEXT IS NULL
    UNION ALL
    SELECT run_id FROM keyed
),
document AS MATERIALIZED (
    SELECT document.*
    FROM fresh
    CROSS JOIN json_to_recordset(:jobs::JSON) AS document (
        place INTEGER, id TEXT, name TEXT, org TEXT, status TEXT, class_id BIGINT, class_key TEXT, demand TEXT,
        needs JSON, is_needed BOOLEAN, expires_at BIGINT, agent_id TEXT, spec TEXT
    )
),
made_run AS (
    INSERT INTO runs (id, name, org, status, submitted_by, created_at, jobs_live)
    SELECT
        fresh.run_id, :name, :org, 'running', :submitted_by, COALESCE(:now, now_ms()), json_array_length(:jobs::JSON)
    FROM fresh
),
stale AS MATERIALIZED (
    SELECT id FROM demand_classes
    WHERE
        id = ANY (ARRAY(SELECT document.class_id FROM document))
        AND used_at <= COALESCE(:now, now_ms()) - 86400000
    ORDER BY id
    FOR UPDATE
),
-- Before the rest is inserted: a class that is just being deleted is either kept by this or made anew.
touched AS (
    UPDATE demand_classes SET used_at = COALESCE(:now, now_ms())
    WHERE id = ANY (ARRAY(SELECT stale.id FROM stale))
    RETURNING id
),
made_classes AS (
    INSERT INTO demand_classes (id, key, demand, used_at)
    SELECT DISTINCT ON (class_id) class_id, class_key, demand, COALESCE(:now, now_ms())
    FROM document
    WHERE class_id <> ALL (ARRAY(SELECT touched.id FROM touched))
    ORDER BY class_id
    ON CONFLICT DO NOTHING
),
made_needs AS (
    INSERT INTO job_needs (need_id, job_id)
    SELECT need.value, document.id FROM document CROSS JOIN json_array_elements_text(document.needs) AS need (value)
),
made AS (
    INSERT INTO jobs (
        id, run_id, name, org, status, class_id, is_needed, created_at, queued_at, expires_at,
        agent_id, owner_instance_id, dispatched_at, ack_deadline, scaler, needs, spec, offers
    )
    SELECT
        id,
        :run_id,
        name,
        org,
        status,
        class_id,
        is_needed,
        COALESCE(:now, now_ms()),
        CASE WHEN status <> 'pending' THEN COALESCE(:now, now_ms()) END,
        expires_at,
        agent_id,
        CASE WHEN status = 'dispatched' THEN :instance_id::TEXT END,
        CASE WHEN status = 'dispatched' THEN COALESCE(:now, now_ms()) END,
        CASE WHEN status = 'dispatched' THEN COALESCE(:now, now_ms()) + :ack_ms::BIGINT END,
        CASE WHEN status = 'dispatched' THEN :scaler::TEXT END,
        needs::TEXT,
        spec,
        (status = 'dispatched')::INTEGER
    FROM document
    ORDER BY place
    RETURNING *
)
SELECT 'job' AS move, made.* FROM made;

-- name: job
-- One job.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand FROM jobs WHERE id = :job_id;

-- name: jobs_of_run
-- Page of one run's jobs, newest first.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE run_id BETWEEN :run_id AND :run_id
    AND (:status::TEXT IS NULL OR status = :status)
    AND (:org::TEXT IS NULL OR org = :org)
    AND (:before_seq::BIGINT IS NULL OR seq < :before_seq)
ORDER BY run_id DESC, seq DESC
LIMIT :limit;

-- name: jobs_by_status
-- Page of the jobs with one status, newest first.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE status BETWEEN :status AND :status
    AND (:org::TEXT IS NULL OR org = :org)
    AND seq < COALESCE(:before_seq, 9223372036854775807)
ORDER BY status DESC, seq DESC
LIMIT :limit;

-- name: jobs_listed
-- Page of all jobs, newest first.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE (:org::TEXT IS NULL OR org = :org) AND seq < COALESCE(:before_seq, 9223372036854775807)
ORDER BY seq DESC
LIMIT :limit;

-- name: waiting_classes
-- Classes with queued jobs by their oldest, found by hopping from class to class in the queue's index.
WITH RECURSIVE head AS (
    (SELECT class_id, seq FROM jobs WHERE status = 'queued' ORDER BY class_id, seq LIMIT 1)
    UNION ALL
    SELECT next.class_id, next.seq
    FROM head CROSS JOIN LATERAL (
        SELECT jobs.class_id, jobs.seq FROM jobs
        WHERE jobs.status = 'queued' AND jobs.class_id > head.class_id
        ORDER BY jobs.class_id, jobs.seq
        LIMIT 1
    ) AS next
),
oldest AS MATERIALIZED (
    SELECT class_id, seq FROM head ORDER BY seq LIMIT :limit
)
SELECT
    oldest.class_id,
    oldest.seq,
    (SELECT jobs.id FROM jobs WHERE jobs.seq = oldest.seq) AS id,
    (SELECT demand FROM demand_classes WHERE demand_classes.id = oldest.class_id) AS demand
FROM oldest
ORDER BY oldest.seq;

-- name: queued_of_class
-- Oldest queued, unexpired jobs of a class; on demand only those that no live spawn is bound to.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE class_id BETWEEN :class_id AND :class_id
    AND status = 'queued'
    AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
    AND NOT (
        :unserved::BOOLEAN
        AND EXISTS (
            SELECT 1 FROM scaler_spawning_agents AS spawn
            WHERE spawn.bound_job_id = jobs.id AND spawn.state IN ('booting', 'registered')
        )
    )
ORDER BY class_id, seq
LIMIT :limit;

-- name: queued_count
-- How many jobs wait for an agent.
SELECT count(*) AS jobs FROM jobs WHERE status = 'queued';

-- name: counts_by_status
-- How many jobs have each status.
SELECT status, count(*) AS jobs FROM jobs GROUP BY status;

-- name: claim_oldest
-- Claim the oldest claimable job of the given classes: looks at the head of each, then locks one job of the best one.
-- A row without an id says that there are jobs, but others are moving all of them right now.  Either row names the
-- agent in its last column, which is the one that counts of those with that name: claims run many at a time.
WITH head AS MATERIALIZED (
    SELECT class.id, oldest.seq
    FROM (SELECT value::BIGINT AS id FROM json_array_elements_text(:class_ids::JSON)) AS class
    CROSS JOIN LATERAL (
        SELECT jobs.seq FROM jobs
        WHERE jobs.class_id BETWEEN class.id AND class.id
            AND jobs.status = 'queued'
            AND (jobs.expires_at IS NULL OR jobs.expires_at > COALESCE(:now, now_ms()))
        ORDER BY jobs.class_id, jobs.seq
        LIMIT 1
    ) AS oldest
    ORDER BY oldest.seq
),
picked AS MATERIALIZED (
    SELECT free.id
    FROM head CROSS JOIN LATERAL (
        SELECT jobs.id FROM jobs
        WHERE jobs.class_id BETWEEN head.id AND head.id
            AND jobs.status = 'queued'
            AND (jobs.expires_at IS NULL OR jobs.expires_at > COALESCE(:now, now_ms()))
        ORDER BY jobs.class_id, jobs.seq
        LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS free
    LIMIT 1
),
claimed AS (
    UPDATE jobs SET
        status = 'dispatched',
        agent_id = :agent_id,
        owner_instance_id = :instance_id,
        dispatched_at = COALESCE(:now, now_ms()),
        offers = offers + 1,
        ack_deadline = COALESCE(:now, now_ms()) + :ack_ms::BIGINT,
        scaler = :scaler,
        last_provisioning_error = NULL,
        unroutable_since = NULL
    WHERE jobs.id = ANY (ARRAY(SELECT picked.id FROM picked))
    RETURNING jobs.*
)
SELECT
    claimed.*,
    (SELECT demand FROM demand_classes WHERE demand_classes.id = claimed.class_id) AS demand,
    :agent_id::TEXT AS agent_id
FROM (SELECT 1 FROM head LIMIT 1) AS waiting LEFT JOIN claimed ON true;

-- name: claim_job
-- Claim one job.
UPDATE jobs SET
    status = 'dispatched',
    agent_id = :agent_id,
    owner_instance_id = :instance_id,
    dispatched_at = COALESCE(:now, now_ms()),
    offers = offers + 1,
    ack_deadline = COALESCE(:now, now_ms()) + :ack_ms::BIGINT,
    scaler = :scaler,
    last_provisioning_error = NULL,
    unroutable_since = NULL
WHERE id = :job_id AND status || '' = 'queued' AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: claim_bound
-- Claim the job that an agent's spawn was made for.
UPDATE jobs SET
    status = 'dispatched',
    agent_id = :agent_id,
    owner_instance_id = :instance_id,
    dispatched_at = COALESCE(:now, now_ms()),
    offers = offers + 1,
    ack_deadline = COALESCE(:now, now_ms()) + :ack_ms::BIGINT,
    scaler = :scaler,
    last_provisioning_error = NULL,
    unroutable_since = NULL
WHERE id = (SELECT bound_job_id FROM scaler_spawning_agents WHERE agent_id = :agent_id AND state = 'registered')
    AND status || '' = 'queued'
    AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: start_job
-- Its agent acknowledged the job; also answers an acknowledgement that was recorded before.
UPDATE jobs SET
    status = 'running',
    started_at = COALESCE(started_at, :now, now_ms()),
    ack_deadline = NULL,
    reason = NULL,
    owner_instance_id = COALESCE(:instance_id, owner_instance_id)
WHERE id = :job_id AND agent_id = :agent_id AND status || '' IN ('dispatched', 'running')
    AND offers = COALESCE(:offer, offers)
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: requeue_job
-- Return an offered job to its place in the queue, while attempts are left.
UPDATE jobs SET
    status = 'queued',
    attempts = attempts + :attempts_add::INTEGER,
    reason = :reason,
    agent_id = NULL,
    owner_instance_id = NULL,
    dispatched_at = NULL,
    ack_deadline = NULL,
    scaler = NULL
WHERE id = :job_id
    AND agent_id = :agent_id
    AND status || '' = 'dispatched'
    AND offers = COALESCE(:offer::INTEGER, offers)
    AND attempts + :attempts_add::INTEGER < :attempts_max::INTEGER
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: offer_again
-- Give the agent of an offered job its time to acknowledge anew.
UPDATE jobs SET ack_deadline = COALESCE(:now, now_ms()) + :ack_ms::BIGINT
WHERE id = :job_id AND agent_id = :agent_id AND status || '' = 'dispatched' AND offers = :offer::INTEGER
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: finish_lone_job
-- End a job that no other job needs, and its run when nothing else is left of it.
WITH locked AS MATERIALIZED (
    SELECT runs.id FROM runs WHERE runs.id = (SELECT jobs.run_id FROM jobs WHERE jobs.id = :job_id) FOR NO KEY UPDATE
),
ended AS (
    UPDATE jobs SET
        status = :status,
        finished_at = COALESCE(:now, now_ms()),
        exit_code = :exit_code,
        signal = :signal,
        reason = COALESCE(:reason, reason),
        attempts = attempts + :attempts_add::INTEGER,
        cancel_requested_at = CASE
            WHEN :status = 'cancelled' THEN COALESCE(cancel_requested_at, :now, now_ms()) ELSE cancel_requested_at
        END,
        ack_deadline = NULL,
        recovery_deadline = NULL,
        unroutable_since = NULL
    FROM locked
    WHERE jobs.id = :job_id
        AND NOT jobs.is_needed
        AND jobs.status || '' = ANY (ARRAY(SELECT json_array_elements_text(:from_statuses::JSON)))
        AND (:agent_id::TEXT IS NULL OR jobs.agent_id = :agent_id)
        AND jobs.offers = COALESCE(:offer::INTEGER, jobs.offers)
        AND (
            :is_seen::INTEGER IS NULL
            OR (
                jobs.owner_instance_id IS NOT DISTINCT FROM :seen_owner::TEXT
                AND jobs.recovery_deadline IS NOT DISTINCT FROM :seen_deadline::BIGINT
            )
        )
    RETURNING jobs.*
),
closed AS (
    UPDATE runs SET
        jobs_live = jobs_live - 1,
        jobs_cancelled = jobs_cancelled + (ended.status = 'cancelled')::INTEGER,
        jobs_failed = jobs_failed + (ended.status NOT IN ('success', 'cancelled'))::INTEGER,
        finished_at = CASE WHEN jobs_live = 1 THEN COALESCE(:now, now_ms()) END,
        status = CASE
            WHEN jobs_live > 1 THEN runs.status
            WHEN ended.status = 'success' AND jobs_cancelled + jobs_failed = 0 THEN 'success'
            WHEN runs.status = 'cancelling' AND (ended.status = 'cancelled' OR jobs_cancelled > 0) THEN 'cancelled'
            ELSE 'failed'
        END
    FROM ended
    WHERE runs.id = (SELECT jobs.run_id FROM jobs WHERE jobs.id = :job_id)
    RETURNING runs.jobs_live = 0 AS run_over
)
SELECT
    ended.*,
    closed.run_over,
    (SELECT demand FROM demand_classes WHERE demand_classes.id = ended.class_id) AS demand
FROM ended CROSS JOIN closed;

-- name: lock_run_of_job
-- Let one end of a run's jobs at a time look at the others.
SELECT runs.id FROM runs WHERE runs.id = (SELECT jobs.run_id FROM jobs WHERE jobs.id = :job_id) FOR NO KEY UPDATE;

-- name: end_job
-- End a job.  What follows from it, the next queries do.
UPDATE jobs SET
    status = :status,
    finished_at = COALESCE(:now, now_ms()),
    exit_code = :exit_code,
    signal = :signal,
    reason = COALESCE(:reason, reason),
    attempts = attempts + :attempts_add::INTEGER,
    cancel_requested_at = CASE
        WHEN :status = 'cancelled' THEN COALESCE(cancel_requested_at, :now, now_ms()) ELSE cancel_requested_at
    END,
    ack_deadline = NULL,
    recovery_deadline = NULL,
    unroutable_since = NULL
WHERE id = :job_id
    AND status || '' = ANY (ARRAY(SELECT json_array_elements_text(:from_statuses::JSON)))
    AND (:agent_id::TEXT IS NULL OR agent_id = :agent_id)
    AND offers = COALESCE(:offer::INTEGER, offers)
    AND (
        :is_seen::INTEGER IS NULL
        OR (
            owner_instance_id IS NOT DISTINCT FROM :seen_owner::TEXT
            AND recovery_deadline IS NOT DISTINCT FROM :seen_deadline::BIGINT
        )
    )
    AND (
        :grace_ms::BIGINT IS NULL
        OR (unroutable_since <= COALESCE(:now, now_ms()) - :grace_ms AND last_provisioning_error IS NULL)
    )
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: skip_dependents
-- Skip all that needs a job which ended without success, and all that needs those.
UPDATE jobs SET status = 'skipped', finished_at = COALESCE(:now, now_ms()), reason = :reason
WHERE status || '' = 'pending'
    AND id = ANY (ARRAY(
        WITH RECURSIVE doomed AS (
            SELECT job_needs.job_id
            FROM job_needs
            WHERE job_needs.need_id = :job_id
                AND (SELECT need.status FROM jobs AS need WHERE need.id = :job_id)
                    IN ('failed', 'cancelled', 'timed_out', 'unroutable', 'skipped')
            UNION
            SELECT next.job_id
            FROM doomed CROSS JOIN LATERAL (
                SELECT job_needs.job_id FROM job_needs WHERE job_needs.need_id = doomed.job_id OFFSET 0
            ) AS next
        )
        SELECT doomed.job_id FROM doomed
    ))
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: release_dependents
-- Queue what needs a job, if all that it needs has ended with success.
UPDATE jobs SET status = 'queued', queued_at = COALESCE(:now, now_ms())
WHERE status || '' = 'pending'
    AND id = ANY (ARRAY(
        SELECT dependent.job_id
        FROM job_needs AS dependent
        WHERE dependent.need_id = :job_id
            AND (
                SELECT count(*)
                FROM job_needs
                WHERE job_needs.job_id = dependent.job_id
                    AND (SELECT need.status FROM jobs AS need WHERE need.id = job_needs.need_id) <> 'success'
            ) = 0
    ))
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: close_run
-- Count a run's jobs anew, and end it when all are over.
UPDATE runs SET
    jobs_live = counted.live,
    jobs_cancelled = counted.cancelled,
    jobs_failed = counted.failed,
    finished_at = CASE WHEN counted.live = 0 THEN COALESCE(:now, now_ms()) END,
    status = CASE
        WHEN counted.live > 0 THEN runs.status
        WHEN counted.cancelled + counted.failed = 0 THEN 'success'
        WHEN runs.status = 'cancelling' AND counted.cancelled > 0 THEN 'cancelled'
        ELSE 'failed'
    END
FROM (
    SELECT
        count(*) FILTER (WHERE status IN ('pending', 'queued', 'dispatched', 'running', 'recovering', 'cancelling'))
            AS live,
        count(*) FILTER (WHERE status = 'cancelled') AS cancelled,
        count(*) FILTER (WHERE status IN ('failed', 'timed_out', 'unroutable')) AS failed
    FROM jobs
    WHERE jobs.run_id = COALESCE(:run_id::TEXT, (SELECT jobs.run_id FROM jobs WHERE jobs.id = :job_id))
) AS counted
WHERE runs.id = COALESCE(:run_id::TEXT, (SELECT jobs.run_id FROM jobs WHERE jobs.id = :job_id)) AND runs.finished_at IS NULL
RETURNING runs.jobs_live = 0 AS run_over;

-- name: recover_job
-- The agent of a started job is gone: it may return until the deadline.
UPDATE jobs SET
    status = CASE WHEN status = 'running' THEN 'recovering' ELSE status END,
    recovery_deadline = :deadline
WHERE id = :job_id AND agent_id = :agent_id AND status || '' IN ('running', 'cancelling')
    AND (
        :is_seen::INTEGER IS NULL
        OR (
            owner_instance_id IS NOT DISTINCT FROM :seen_owner::TEXT
            AND recovery_deadline IS NOT DISTINCT FROM :seen_deadline::BIGINT
        )
    )
RETURNING id;

-- name: resume_job
-- The agent of a started job is back, at this instance.
UPDATE jobs SET
    status = CASE WHEN status = 'recovering' THEN 'running' ELSE status END,
    owner_instance_id = :instance_id,
    recovery_deadline = NULL
WHERE id = :job_id AND agent_id = :agent_id AND status || '' IN ('running', 'recovering', 'cancelling')
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

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
WHERE run_id = :run_id AND status || '' IN ('pending', 'queued', 'dispatched', 'running', 'recovering')
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: cancel_started_job
-- Mark a started job as told to stop.
UPDATE jobs SET
    status = 'cancelling',
    cancel_requested_at = COALESCE(cancel_requested_at, :now, now_ms()),
    reason = :reason
WHERE id = :job_id AND status || '' IN ('running', 'recovering')
RETURNING jobs.*, (SELECT demand FROM demand_classes WHERE id = jobs.class_id) AS demand;

-- name: held_jobs
-- Jobs that an agent holds.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE agent_id BETWEEN :agent_id AND :agent_id AND status IN ('dispatched', 'running', 'recovering', 'cancelling')
ORDER BY agent_id, seq;

-- name: jobs_owned_by
-- Held jobs whose claim was made by an instance.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE owner_instance_id BETWEEN :instance_id AND :instance_id
    AND status IN ('dispatched', 'running', 'recovering', 'cancelling')
ORDER BY owner_instance_id, seq
LIMIT :limit;

-- name: overdue_acks
-- Offered jobs that nobody acknowledged in time.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE ack_deadline <= COALESCE(:now, now_ms())
ORDER BY ack_deadline, seq
LIMIT :limit;

-- name: overdue_recoveries
-- Started jobs whose agent did not return in time.
SELECT jobs.*, (SELECT demand FROM demand_classes WHERE id = class_id) AS demand
FROM jobs
WHERE recovery_deadline <= COALESCE(:now, now_ms())
ORDER BY recovery_deadline, seq
LIMIT :limit;

-- name: expired_jobs
-- Waiting jobs past their time.
SELECT id, run_id, last_provisioning_error
FROM jobs
WHERE status IN ('pending', 'queued') AND expires_at <= COALESCE(:now, now_ms())
ORDER BY expires_at, seq
LIMIT :limit;

-- name: set_provisioning_error
-- Why the last spawn for a queued job failed; such a job is not unroutable.
UPDATE jobs SET last_provisioning_error = :text, unroutable_since = NULL
WHERE id = :job_id AND status || '' = 'queued'
RETURNING id;

-- name: mark_unroutable
-- Stamp queued jobs of a class as seen unroutable; those that are being moved right now are left out.
WITH seen AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE class_id BETWEEN :class_id AND :class_id
        AND status = 'queued'
        AND unroutable_since IS NULL
        AND last_provisioning_error IS NULL
    ORDER BY class_id, seq
    LIMIT :limit
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET unroutable_since = COALESCE(:now, now_ms())
WHERE jobs.id = ANY (ARRAY(SELECT seen.id FROM seen))
RETURNING jobs.id;

-- name: clear_unroutable
-- Take the stamps of a class away; jobs that are being moved right now are left out.
WITH stamped AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE class_id BETWEEN :class_id AND :class_id AND unroutable_since IS NOT NULL
    ORDER BY class_id, unroutable_since, seq
    LIMIT :limit
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET unroutable_since = NULL
WHERE jobs.id = ANY (ARRAY(SELECT stamped.id FROM stamped))
RETURNING jobs.id;

-- name: unroutable_jobs
-- Queued jobs of a class that were stamped longer ago than the grace, and that no agent is being made for.
SELECT id, run_id
FROM jobs
WHERE class_id BETWEEN :class_id AND :class_id
    AND unroutable_since <= COALESCE(:now, now_ms()) - :grace_ms::BIGINT
    AND status || '' = 'queued'
    AND last_provisioning_error IS NULL
    AND NOT EXISTS (
        SELECT 1 FROM scaler_spawning_agents AS spawn
        WHERE spawn.bound_job_id = jobs.id AND spawn.state IN ('booting', 'registered')
    )
ORDER BY class_id, unroutable_since, seq
LIMIT :limit;

-- name: prune_jobs
-- Delete the runs that ended first, with jobs, needs, output and idempotency keys.
WITH old AS MATERIALIZED (
    SELECT id FROM runs WHERE finished_at < :older_than ORDER BY finished_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
),
gone AS MATERIALIZED (
    SELECT id FROM jobs WHERE run_id = ANY (ARRAY(SELECT old.id FROM old))
),
gone_chunks AS (
    DELETE FROM log_chunks WHERE job_id = ANY (ARRAY(SELECT gone.id FROM gone))
),
gone_needs AS (
    DELETE FROM job_needs WHERE need_id = ANY (ARRAY(SELECT gone.id FROM gone))
),
gone_keys AS (
    DELETE FROM idempotency_keys WHERE run_id = ANY (ARRAY(SELECT old.id FROM old))
),
gone_jobs AS (
    DELETE FROM jobs WHERE id = ANY (ARRAY(SELECT gone.id FROM gone))
),
gone_runs AS (
    DELETE FROM runs WHERE id = ANY (ARRAY(SELECT old.id FROM old))
)
SELECT id FROM gone;

-- name: oldest_jobs
-- Classes of the jobs that were made first.
SELECT class_id, created_at FROM jobs ORDER BY seq LIMIT :limit;

-- name: prune_classes
-- Delete demand classes that were not submitted for long and that no job has any more.
-- One that is submitted meanwhile has another date by the time that its row is free, and stays.
DELETE FROM demand_classes
WHERE used_at < :used_before AND id = ANY (ARRAY(
    SELECT id FROM demand_classes
    WHERE used_at < :used_before AND id <> ALL (ARRAY(SELECT value::BIGINT FROM json_array_elements_text(:held::JSON)))
    ORDER BY used_at
    LIMIT :limit
))
RETURNING id;

-- name: ended_jobs
-- Which of the given jobs are over.
SELECT id FROM jobs
WHERE id = ANY (ARRAY(SELECT json_array_elements_text(:job_ids::JSON)))
    AND status || '' IN ('success', 'failed', 'cancelled', 'timed_out', 'unroutable', 'skipped');
