-- name: put_capacity
-- What an instance could serve, replacing what it said before.
INSERT INTO scaler_capacity (instance_id, payload, updated_at)
VALUES (:instance_id, :payload, COALESCE(:now, now_ms()))
ON CONFLICT (instance_id) DO UPDATE SET payload = excluded.payload, updated_at = excluded.updated_at;

-- name: capacities
-- What the other present instances could serve.
SELECT scaler_capacity.instance_id, scaler_capacity.payload
FROM scaler_capacity JOIN cluster_instances ON cluster_instances.instance_id = scaler_capacity.instance_id
WHERE scaler_capacity.instance_id <> :except_instance_id
    AND cluster_instances.last_beat_at >= COALESCE(:now, now_ms()) - :present_ms
ORDER BY scaler_capacity.instance_id
LIMIT :limit;

-- name: ask_peer
-- Put a request before another instance.
INSERT INTO peer_requests (id, target, kind, payload, created_at, expires_at)
VALUES (:id, :target, :kind, :payload, COALESCE(:now, now_ms()), COALESCE(:now, now_ms()) + :ttl_ms);

-- name: peer_requests
-- Requests to an instance that wait for its answer, oldest first.
SELECT id, kind, payload FROM peer_requests
WHERE target = :target AND answered_at IS NULL AND expires_at > COALESCE(:now, now_ms())
ORDER BY created_at, id
LIMIT :limit;

-- name: answer_peer
-- The answer to a request that waits.
UPDATE peer_requests SET answer = :answer, answered_at = COALESCE(:now, now_ms())
WHERE id = :id AND answered_at IS NULL
RETURNING id;

-- name: peer_answer
-- The answer to a request, if there is one.
SELECT answer FROM peer_requests WHERE id = :id AND answered_at IS NOT NULL;

-- name: purge_peer_requests
-- Requests that nobody waits for any more.
DELETE FROM peer_requests WHERE expires_at <= COALESCE(:now, now_ms())
RETURNING id;

-- name: revoked_session_tokens
-- Revoked tokens that agents connected to an instance authenticated with.
SELECT DISTINCT agent_tokens.id
FROM agent_sessions JOIN agent_tokens ON agent_tokens.id = agent_sessions.token_id
WHERE agent_sessions.instance_id = :instance_id AND agent_tokens.revoked_at IS NOT NULL
LIMIT :limit;

-- name: connections_of
-- The agents connected to an instance, as its sessions tell.
SELECT agent_id, connection_id FROM agent_sessions WHERE instance_id = :instance_id;

-- name: strays
-- Agents that an instance made, that have registered, are connected to no instance that lives, and hold no job.
SELECT spawns.agent_id FROM scaler_spawning_agents AS spawns
WHERE spawns.owner_instance_id = :instance_id AND spawns.backend_type <> 'event' AND spawns.state = 'registered'
    AND NOT EXISTS (
        SELECT 1 FROM agent_sessions
        JOIN cluster_instances ON cluster_instances.instance_id = agent_sessions.instance_id
        WHERE agent_sessions.agent_id = spawns.agent_id
            AND cluster_instances.last_beat_at > COALESCE(:now, now_ms()) - 120000
    )
    AND NOT EXISTS (
        SELECT 1 FROM jobs
        WHERE jobs.agent_id = spawns.agent_id AND jobs.status IN ('dispatched', 'running', 'recovering', 'cancelling')
    )
ORDER BY spawns.agent_id
LIMIT :limit;

-- name: forget_reservations_of
-- Reservations of the local spawns of an instance that `forget_spawns_of` deletes.
DELETE FROM scaler_reservations
WHERE owner_instance_id = :instance_id
    AND agent_id IN (
        SELECT agent_id FROM scaler_spawning_agents AS spawns
        WHERE owner_instance_id = :instance_id AND backend_type <> 'event' AND worker_id IS NULL
            AND NOT EXISTS (
                SELECT 1 FROM agent_sessions
                JOIN cluster_instances ON cluster_instances.instance_id = agent_sessions.instance_id
                WHERE agent_sessions.agent_id = spawns.agent_id AND agent_sessions.instance_id <> :instance_id
                    AND cluster_instances.last_beat_at > COALESCE(:now, now_ms()) - 120000
            )
            AND NOT EXISTS (
                SELECT 1 FROM jobs
                WHERE jobs.agent_id = spawns.agent_id
                    AND jobs.status IN ('dispatched', 'running', 'recovering', 'cancelling')
            )
    );

-- name: forget_spawns_of
-- Local spawns of an instance that is silent for long: what lives of them is its host's to clean up.
-- Those whose agents went on with another instance stay, and those that hold jobs until that is settled.
DELETE FROM scaler_spawning_agents
WHERE owner_instance_id = :instance_id AND backend_type <> 'event' AND worker_id IS NULL
    AND NOT EXISTS (
        SELECT 1 FROM agent_sessions
        JOIN cluster_instances ON cluster_instances.instance_id = agent_sessions.instance_id
        WHERE agent_sessions.agent_id = scaler_spawning_agents.agent_id
            AND agent_sessions.instance_id <> :instance_id
            AND cluster_instances.last_beat_at > COALESCE(:now, now_ms()) - 120000
    )
    AND NOT EXISTS (
        SELECT 1 FROM jobs
        WHERE jobs.agent_id = scaler_spawning_agents.agent_id
            AND jobs.status IN ('dispatched', 'running', 'recovering', 'cancelling')
    )
RETURNING agent_id;

-- name: forget_instance
-- An instance that will never come back, if nothing was heard of it meanwhile.
DELETE FROM cluster_instances WHERE instance_id = :instance_id AND last_beat_at <= :heard_before - 60000
RETURNING instance_id;

-- name: forget_addresses_of
-- The addresses of microVMs on the host of an instance that is gone for good.
DELETE FROM ip_allocations WHERE owner_instance_id = :instance_id
RETURNING ip;

-- name: forget_capacity_of
-- What an instance could serve that is gone for good.
DELETE FROM scaler_capacity WHERE instance_id = :instance_id
RETURNING instance_id;

-- name: forget_links_of
-- The links of workers to an instance that is gone for good.
DELETE FROM worker_links WHERE instance_id = :instance_id
RETURNING worker_id;
