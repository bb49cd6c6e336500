-- name: slot_state
-- What admits or refuses one more agent of an event scaler.
SELECT
    (
        SELECT count(*) FROM scaler_spawning_agents
        WHERE scaler_name = :scaler_name AND backend_type = 'event'
    ) AS taken,
    deferral.failures, deferral.updated_at, deferral.until, deferral.last_error,
    COALESCE(
        (
            SELECT state = 'booting' FROM scaler_spawning_agents AS probe
            WHERE probe.agent_id = deferral.probe_agent_id
        ), FALSE
    ) AS is_probing,
    COALESCE(:now::BIGINT, now_ms()) AS now
FROM (SELECT 1) AS one LEFT JOIN scaler_deferrals AS deferral ON deferral.scaler_name = :scaler_name;

-- name: insert_cluster_spawn
-- Write an event spawn and its reservation, under the scaler's lock, if it has room in the cluster and is not deferred.
WITH made AS (
    INSERT INTO scaler_spawning_agents (
        agent_id, scaler_name, backend_type, state, label_set, labels, mandatory_labels, shape, machine_pool,
        provisioning_targets, roles, token_id, owner_instance_id, worker_id, bound_job_id, run_id, org, job_image,
        reuse_idle_seconds, reuse_max_jobs, spawned_at
    )
    SELECT
        :agent_id::TEXT, :scaler_name::TEXT, :backend_type::TEXT, :state::TEXT, :label_set::TEXT, :labels::TEXT,
        :mandatory_labels::TEXT, :shape::TEXT, :machine_pool::TEXT, :provisioning_targets::TEXT, :roles::TEXT,
        :token_id::TEXT, :owner_instance_id::TEXT, :worker_id::TEXT, :bound_job_id::TEXT, :run_id::TEXT, :org::TEXT,
        :job_image::BOOLEAN, :reuse_idle_seconds::DOUBLE PRECISION, :reuse_max_jobs::INTEGER,
        COALESCE(:now::BIGINT, now_ms())
    WHERE has_event_slot(
        :lock_name::TEXT, :lock_wait_ms::BIGINT, :scaler_name::TEXT, :agents_max::BIGINT, :may_probe::BOOLEAN,
        COALESCE(:now, now_ms())
    )
    ON CONFLICT (bound_job_id) WHERE state IN ('booting', 'registered') DO NOTHING
    RETURNING agent_id
),
made_reservation AS (
    INSERT INTO scaler_reservations (agent_id, scaler_name, shape, machine_pool, owner_instance_id, reserved_at)
    SELECT
        agent_id, :reserved_scaler::TEXT, :reserved_shape::TEXT, :reserved_pool::TEXT, :reserved_owner::TEXT,
        COALESCE(:now, now_ms())
    FROM made
),
probing AS (
    UPDATE scaler_deferrals SET probe_agent_id = made.agent_id
    FROM made
    WHERE scaler_deferrals.scaler_name = :scaler_name AND scaler_deferrals.failures > 0
)
SELECT agent_id FROM made;

-- name: emit_scale_up
-- Write the scale-up of an event spawn for each of its targets; none leaves for a spawn that has ended.
WITH sent AS (
    UPDATE scaler_spawning_agents SET emitted_at = COALESCE(emitted_at, :now, now_ms())
    WHERE agent_id = :subject AND backend_type = 'event' AND state || '' = 'booting'
    RETURNING agent_id
),
made AS (
    INSERT INTO kici_events (
        id, emission_id, name, subject, source, chain_depth, target, state, payload, sealed, created_at, due_at,
        expires_at
    )
    SELECT
        row.id, :emission_id::TEXT, :name::TEXT, sent.agent_id, :source::TEXT, :chain_depth::INTEGER, row.target,
        row.state, :payload::TEXT, :sealed::BYTEA, COALESCE(:now::BIGINT, now_ms()), COALESCE(:now, now_ms()),
        COALESCE(:now, now_ms()) + :expires_in_ms::BIGINT
    FROM sent CROSS JOIN json_to_recordset(:rows::JSON) AS row (id TEXT, target TEXT, state TEXT)
    ON CONFLICT (subject, name, target) WHERE subject IS NOT NULL AND state IN ('pending', 'awaiting') DO NOTHING
)
SELECT :emission_id::TEXT AS emission_id FROM sent;

-- name: end_provision
-- An event spawn whose scale-up left is being torn down, by its owner or adopter.
UPDATE scaler_spawning_agents SET
    state = 'ending',
    end_reason = COALESCE(end_reason, :reason),
    destroy_requested_at = COALESCE(destroy_requested_at, :now, now_ms())
WHERE agent_id = :agent_id AND backend_type = 'event' AND emitted_at IS NOT NULL
    AND (adopted_by IS NULL OR adopted_by = :instance_id)
RETURNING agent_id, scaler_name;

-- name: condemn_provision
-- An event spawn is torn down by the leader, if all that it was judged by still holds.
UPDATE scaler_spawning_agents SET
    state = 'ending',
    end_reason = COALESCE(end_reason, :reason),
    destroy_requested_at = COALESCE(destroy_requested_at, :now, now_ms())
WHERE agent_id = :agent_id AND backend_type = 'event' AND emitted_at IS NOT NULL
    AND adopted_by IS NOT DISTINCT FROM :seen_adopted_by AND state = :seen_state
    AND NOT EXISTS (
        SELECT 1 FROM agent_sessions
        WHERE agent_sessions.agent_id = :agent_id AND agent_sessions.instance_id || '' = ANY (ARRAY(
            SELECT instance_id FROM cluster_instances
            WHERE last_beat_at > COALESCE(:now, now_ms()) - :present_ms::BIGINT
        ))
    )
    AND EXISTS (
        SELECT 1 FROM leases
        WHERE leases.name = 'leader' AND leases.token = :term::BIGINT AND leases.expires_at > COALESCE(:now, now_ms())
    )
RETURNING agent_id, scaler_name;

-- name: withdraw_scale_ups
-- A scale-up that is still waiting is not wanted any more.
UPDATE kici_events SET
    state = 'dead', dead_at = COALESCE(:now, now_ms()), dead_reason = 'withdrawn', sealed = NULL
WHERE subject = :agent_id AND name = :scale_up AND state || '' = 'pending'
RETURNING subject AS agent_id;

-- name: scale_up_runs
-- Runs that are at work on the scale-up of an agent.
SELECT subject AS agent_id, run_id FROM kici_events WHERE subject = :agent_id AND name = :scale_up AND state || '' = 'awaiting';

-- name: record_condemned
-- Why a provision was torn down.  Who adopted it stays.
INSERT INTO scaler_provision_outcomes (
    agent_id, scaler_name, condemned_reason, condemned_at, recorded_at, updated_at
)
VALUES (
    :agent_id, :scaler_name, :reason, COALESCE(:now, now_ms()), COALESCE(:now, now_ms()), COALESCE(:now, now_ms())
)
ON CONFLICT (agent_id) DO UPDATE SET
    condemned_reason = excluded.condemned_reason,
    condemned_at = excluded.condemned_at,
    updated_at = excluded.updated_at;

-- name: record_adoption
-- Who adopted a provision; the first one stays.
INSERT INTO scaler_provision_outcomes (agent_id, scaler_name, adopted_by, adopted_at, recorded_at, updated_at)
SELECT agent_id, scaler_name, adopted_by, adopted_at, adopted_at, adopted_at
FROM scaler_spawning_agents
WHERE agent_id = :agent_id AND backend_type = 'event' AND adopted_by IS NOT NULL
ON CONFLICT (agent_id) DO UPDATE SET
    adopted_by = COALESCE(scaler_provision_outcomes.adopted_by, excluded.adopted_by),
    adopted_at = COALESCE(scaler_provision_outcomes.adopted_at, excluded.adopted_at),
    updated_at = excluded.updated_at;

-- name: clear_deferral_of
-- An agent of an event scaler came: the scaler works.
DELETE FROM scaler_deferrals
WHERE scaler_name = (
    SELECT scaler_name FROM scaler_spawning_agents WHERE agent_id = :agent_id AND backend_type = 'event'
);

-- name: provision_adopter
-- Who adopted a provision: the live row, else the record of what became of it.
SELECT COALESCE(
    (SELECT adopted_by FROM scaler_spawning_agents WHERE agent_id = :agent_id),
    (SELECT adopted_by FROM scaler_provision_outcomes WHERE agent_id = :agent_id)
) AS adopted_by;

-- name: has_adopted_provisions
-- Whether a coordinator has adopted a provision that lives.
SELECT agent_id FROM scaler_spawning_agents
WHERE adopted_by = :instance_id AND backend_type = 'event'
LIMIT 1;

-- name: purge_outcomes
-- Forget what became of provisions that nothing can ask about any more.
DELETE FROM scaler_provision_outcomes
WHERE agent_id IN (
    SELECT outcome.agent_id FROM scaler_provision_outcomes AS outcome
    WHERE outcome.updated_at < :updated_before
        AND (
            SELECT spawn.state FROM scaler_spawning_agents AS spawn WHERE spawn.agent_id = outcome.agent_id
        ) IS NULL
    LIMIT :limit
)
RETURNING agent_id;

-- name: reap_candidates
-- Event spawns whose agents no live coordinator sees and that may need an end, with what the verdict rests on.
SELECT
    spawn.agent_id, spawn.scaler_name, spawn.state, spawn.owner_instance_id, spawn.adopted_by, spawn.spawned_at,
    spawn.emitted_at, spawn.bound_job_id, spawn.run_id, spawn.end_reason, spawn.provisioning_targets,
    (
        SELECT last_beat_at FROM cluster_instances WHERE cluster_instances.instance_id = spawn.adopted_by
    ) AS adopter_beat_at,
    COALESCE((
        SELECT jobs.status NOT IN ('pending', 'queued', 'dispatched', 'running', 'recovering', 'cancelling')
        FROM jobs WHERE jobs.id = spawn.bound_job_id
    ), FALSE) AS job_over,
    CASE WHEN spawn.state = 'ending' THEN EXISTS (
        SELECT 1 FROM kici_events
        WHERE kici_events.subject = spawn.agent_id AND kici_events.name = :scale_down
            AND kici_events.state IN ('pending', 'awaiting')
    ) ELSE FALSE END AS is_ending_sent,
    CASE WHEN spawn.state = 'ending' THEN (
        SELECT max(kici_events.dead_at) FROM kici_events
        WHERE kici_events.subject = spawn.agent_id AND kici_events.name = :scale_down
    ) END AS undelivered_at
FROM scaler_spawning_agents AS spawn
WHERE spawn.backend_type = 'event'
    AND (spawn.scaler_name, spawn.agent_id) > (:after_scaler::TEXT, :after_agent::TEXT)
    AND (spawn.adopted_by IS NOT NULL OR spawn.state = 'ending' OR spawn.spawned_at < :spawned_before)
    AND NOT EXISTS (
        SELECT 1 FROM agent_sessions
        WHERE agent_sessions.agent_id = spawn.agent_id AND agent_sessions.instance_id = ANY (ARRAY(
            SELECT instance_id FROM cluster_instances
            WHERE last_beat_at > COALESCE(:now, now_ms()) - :present_ms::BIGINT
        ))
    )
ORDER BY spawn.scaler_name, spawn.agent_id
LIMIT :limit;

-- name: provision_news
-- What became of event spawns that their owner still takes for booting.
SELECT
    asked.agent_id, spawn.state, spawn.adopted_by, spawn.end_reason,
    COALESCE((
        SELECT jobs.status NOT IN ('pending', 'queued', 'dispatched', 'running', 'recovering', 'cancelling')
        FROM jobs WHERE jobs.id = spawn.bound_job_id
    ), FALSE) AS job_over,
    (
        SELECT lost.last_error FROM kici_events AS lost
        WHERE lost.subject = asked.agent_id AND lost.name = :scale_up AND lost.state = 'dead'
            AND lost.dead_reason <> 'withdrawn'
            AND NOT EXISTS (
                SELECT 1 FROM kici_events AS other
                WHERE other.subject = asked.agent_id AND other.name = :scale_up
                    AND other.state IN ('pending', 'awaiting', 'processed')
            )
        ORDER BY lost.seq DESC
        LIMIT 1
    ) AS failure
FROM json_array_elements_text(:agent_ids::JSON) AS asked (agent_id)
LEFT JOIN scaler_spawning_agents AS spawn ON spawn.agent_id = asked.agent_id;

-- name: deferrals
-- Event scalers that fail to provide machines.
SELECT
    deferral.*,
    COALESCE(
        (
            SELECT state = 'booting' FROM scaler_spawning_agents AS probe
            WHERE probe.agent_id = deferral.probe_agent_id
        ), FALSE
    ) AS is_probing
FROM scaler_deferrals AS deferral ORDER BY scaler_name LIMIT :limit;

-- name: count_failure
-- A machine of an event scaler did not come; each agent counts once, and none that came after all.
INSERT INTO scaler_counted_failures (scaler_name, agent_id, counted_at)
SELECT :scaler_name, :agent_id, COALESCE(:now::BIGINT, now_ms())
WHERE NOT EXISTS (
    SELECT 1 FROM scaler_provision_outcomes WHERE agent_id = :agent_id AND adopted_by IS NOT NULL
)
ON CONFLICT (scaler_name, agent_id) DO NOTHING
RETURNING agent_id;

-- name: defer_scaler
-- Ask a failing event scaler later than before.
INSERT INTO scaler_deferrals (scaler_name, failures, until, last_error, updated_at)
VALUES (
    :scaler_name, 1, COALESCE(:now, now_ms()) + LEAST(:base_ms::BIGINT, :max_ms::BIGINT), :error, COALESCE(:now, now_ms())
)
ON CONFLICT (scaler_name) DO UPDATE SET
    failures = scaler_deferrals.failures + 1,
    until = COALESCE(:now, now_ms()) + LEAST(:base_ms * (1::BIGINT << LEAST(scaler_deferrals.failures, 30)), :max_ms),
    last_error = excluded.last_error,
    probe_agent_id = NULL,
    updated_at = excluded.updated_at
RETURNING *, FALSE AS is_probing;

-- name: forget_counted
-- Keep so many counted agents of a scaler, the newest.
DELETE FROM scaler_counted_failures
WHERE scaler_name = :scaler_name AND agent_id NOT IN (
    SELECT agent_id FROM scaler_counted_failures WHERE scaler_name = :scaler_name
    ORDER BY counted_at DESC, agent_id
    LIMIT :kept_max
);

-- name: register_claim
-- A claim code that may be redeemed once.
INSERT INTO scaler_pending_claims (
    claim_hash, claim_prefix, agent_id, scaler_name, labels, mandatory_labels, agent_token_ttl_ms, orchestrator_url,
    expires_at, created_at
)
VALUES (
    :claim_hash, :claim_prefix, :agent_id, :scaler_name, :labels, :mandatory_labels, :agent_token_ttl_ms,
    :orchestrator_url, COALESCE(:now::BIGINT, now_ms()) + :ttl_ms::BIGINT, COALESCE(:now, now_ms())
)
RETURNING claim_hash;

-- name: redeem_claim
-- Consume a claim code.
UPDATE scaler_pending_claims SET consumed_at = COALESCE(:now, now_ms())
WHERE claim_hash = :claim_hash AND consumed_at IS NULL AND expires_at > COALESCE(:now, now_ms())
RETURNING *;

-- name: describe_claim
-- Why a claim code cannot be redeemed.
SELECT consumed_at IS NOT NULL AS consumed, expires_at <= COALESCE(:now, now_ms()) AS expired
FROM scaler_pending_claims WHERE claim_hash = :claim_hash;

-- name: give_token
-- Store the credential of a booting event spawn's agent.
WITH given AS (
    UPDATE scaler_spawning_agents SET token_id = :id
    WHERE agent_id = :agent_id AND backend_type = 'event' AND state || '' = 'booting'
    RETURNING agent_id
),
made AS (
    INSERT INTO agent_tokens (
        id, token_hash, token_prefix, kind, labels, mandatory_labels, agent_id, created_at, expires_at, name
    )
    SELECT
        :id::TEXT, :token_hash::TEXT, :token_prefix::TEXT, :kind::TEXT, :labels::TEXT, :mandatory_labels::TEXT,
        given.agent_id, :created_at::BIGINT, :expires_at::BIGINT, :name::TEXT
    FROM given
)
SELECT agent_id FROM given;

-- name: invalidate_claims
-- Claim codes of an agent are good for nothing any more.
DELETE FROM scaler_pending_claims WHERE agent_id = :agent_id RETURNING claim_hash;

-- name: purge_claims
-- Forget claim codes that expired long ago, used or not.
DELETE FROM scaler_pending_claims WHERE expires_at < :expired_before RETURNING claim_hash;
