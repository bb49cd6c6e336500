-- name: insert_spawn
-- Write spawn, reservation and token, unless a live spawn serves the bound job already.
INSERT INTO scaler_spawning_agents (
    agent_id, scaler_name, backend_type, state, label_set, labels, mandatory_labels, shape, machine_pool,
    provisioning_targets, roles, token_id, owner_instance_id, worker_id, bound_job_id, run_id, org, job_image,
    reuse_idle_seconds, reuse_max_jobs, spawned_at
)
VALUES (
    :agent_id, :scaler_name, :backend_type, :state, :label_set, :labels, :mandatory_labels, :shape, :machine_pool,
    :provisioning_targets, :roles, :token_id, :owner_instance_id, :worker_id, :bound_job_id, :run_id, :org, :job_image,
    :reuse_idle_seconds, :reuse_max_jobs, COALESCE(:now, now_ms())
)
ON CONFLICT (bound_job_id) WHERE state IN ('booting', 'registered') DO NOTHING
RETURNING agent_id;
INSERT INTO scaler_reservations (agent_id, scaler_name, shape, machine_pool, owner_instance_id, reserved_at)
VALUES (
    :agent_id, :reserved_scaler, :reserved_shape, :reserved_pool, :reserved_owner, COALESCE(:now, now_ms())
);
INSERT INTO agent_tokens (
    id, token_hash, token_prefix, kind, labels, mandatory_labels, agent_id, created_at, expires_at, name
)
SELECT
    :new_token_id, :token_hash, :token_prefix, :token_kind, :token_labels, :token_gate, :token_agent_id,
    :token_created_at, :token_expires_at, :token_name
WHERE :new_token_id IS NOT NULL;

-- name: spawn
-- One spawn.
SELECT * FROM scaler_spawning_agents WHERE agent_id = :agent_id;

-- name: spawn_for_job
-- The live spawn that serves a job.
SELECT * FROM scaler_spawning_agents
WHERE bound_job_id = :job_id AND state IN ('booting', 'registered');

-- name: spawns
-- Spawns of an owner (or who adopted them), or of all, oldest first.
SELECT * FROM scaler_spawning_agents
WHERE :owner IS NULL OR adopted_by = :owner
    OR (owner_instance_id = :owner AND adopted_by IS NULL)
ORDER BY spawned_at, agent_id
LIMIT :limit;

-- name: register_spawn
-- The agent of a spawn has registered; it keeps the time of the first registration.
-- A machine passes from one coordinator to another when the first has let go of it, or has been silent for longer
-- than it keeps agents by itself.  A connection that came late, after a later one of the same program, is nothing.
UPDATE scaler_spawning_agents SET
    state = 'registered',
    registered_at = COALESCE(registered_at, :now, now_ms()),
    adopted_by = CASE WHEN backend_type = 'event' THEN :instance_id ELSE adopted_by END,
    adopted_at = CASE WHEN backend_type = 'event' THEN COALESCE(:now, now_ms()) ELSE adopted_at END
WHERE agent_id = :agent_id AND state IN ('booting', 'registered')
    AND (
        backend_type <> 'event' OR adopted_by IS NULL OR adopted_by = :instance_id
        OR NOT EXISTS (
            SELECT 1 FROM agent_sessions
            JOIN cluster_instances ON cluster_instances.instance_id = agent_sessions.instance_id
            WHERE agent_sessions.agent_id = :agent_id AND agent_sessions.instance_id = adopted_by
                AND cluster_instances.last_beat_at > COALESCE(:now, now_ms()) - 45000
        )
    )
    AND NOT EXISTS (
        SELECT 1 FROM agent_sessions
        WHERE agent_sessions.agent_id = :agent_id AND agent_sessions.incarnation = :incarnation
            AND agent_sessions.connection_number > :connection_number
    )
RETURNING *;

-- name: end_spawn
-- A spawn is being torn down: it serves its job no longer.
UPDATE scaler_spawning_agents SET
    state = 'ending',
    end_reason = :reason,
    destroy_requested_at = COALESCE(destroy_requested_at, :now, now_ms())
WHERE agent_id = :agent_id AND state IN (SELECT value FROM json_each(:from_states))
    AND (adopted_by IS NULL OR :by IS NULL OR adopted_by = :by)
RETURNING agent_id;

-- name: end_bound_spawn
-- The spawn of an agent that gives a job back serves that job no longer.
UPDATE scaler_spawning_agents SET
    state = 'ending',
    end_reason = :reason,
    destroy_requested_at = COALESCE(destroy_requested_at, :now, now_ms())
WHERE agent_id = :agent_id AND bound_job_id = :job_id AND state IN ('booting', 'registered')
RETURNING agent_id;

-- name: delete_spawn
-- The compute of a spawn is gone.  A machine that was asked for by an event stays until its scale-down is delivered.
DELETE FROM scaler_spawning_agents WHERE agent_id = :agent_id AND emitted_at IS NULL RETURNING agent_id;
DELETE FROM scaler_reservations WHERE agent_id = :agent_id;
UPDATE agent_tokens SET revoked_at = now_ms()
WHERE agent_id = :agent_id AND kind = 'ephemeral' AND revoked_at IS NULL;
