-- name: put_session
-- Where an agent is connected; the newest connection wins, and of one run of its program the one it opened last.
INSERT INTO agent_sessions (
    agent_id, instance_id, connection_id, labels, mandatory_labels, token_id, scaler_name, backend_type, facts,
    registered_at, warm, incarnation, connection_number
)
VALUES (
    :agent_id, :instance_id, :connection_id, :labels, :mandatory_labels, :token_id, :scaler_name, :backend_type, :facts,
    COALESCE(:now, now_ms()), :warm, :incarnation, :connection_number
)
ON CONFLICT (agent_id) DO UPDATE SET
    instance_id = excluded.instance_id,
    connection_id = excluded.connection_id,
    labels = excluded.labels,
    mandatory_labels = excluded.mandatory_labels,
    token_id = excluded.token_id,
    scaler_name = excluded.scaler_name,
    backend_type = excluded.backend_type,
    facts = excluded.facts,
    registered_at = excluded.registered_at,
    warm = excluded.warm,
    incarnation = excluded.incarnation,
    connection_number = excluded.connection_number
WHERE agent_sessions.incarnation <> excluded.incarnation
    OR agent_sessions.connection_number <= excluded.connection_number
RETURNING agent_id;

-- name: release_agent
-- A connection of an agent is over.
DELETE FROM agent_sessions WHERE agent_id = :agent_id AND connection_id = :connection_id RETURNING agent_id;

-- name: session
-- Where an agent is connected.
SELECT * FROM agent_sessions WHERE agent_id = :agent_id;

-- name: sessions
-- Agents of an instance, or of all.
SELECT * FROM agent_sessions
WHERE :instance_id IS NULL OR instance_id = :instance_id
ORDER BY agent_id
LIMIT :limit;

-- name: delete_sessions_of
-- The sockets of an instance are gone.
DELETE FROM agent_sessions WHERE instance_id = :instance_id RETURNING agent_id;
