-- name: create_agent_token
-- Store a credential of agents.
INSERT INTO agent_tokens (
    id, token_hash, token_prefix, kind, labels, mandatory_labels, agent_id, created_at, expires_at, name
)
VALUES (
    :id, :token_hash, :token_prefix, :kind, :labels, :mandatory_labels, :agent_id, :created_at, :expires_at, :name
);

-- name: agent_token
-- A credential of agents by its hash.
SELECT * FROM agent_tokens WHERE token_hash = :token_hash;

-- name: agent_tokens
-- Credentials of agents, newest first.
SELECT * FROM agent_tokens ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: revoke_agent_token
-- End a credential of agents.
UPDATE agent_tokens SET revoked_at = COALESCE(:now, now_ms())
WHERE id = :token_id AND revoked_at IS NULL
RETURNING id;

-- name: purge_agent_tokens
-- Forget ephemeral credentials that ended, unless their agent still has a spawn or a job.
DELETE FROM agent_tokens
WHERE id IN (
    SELECT token.id
    FROM agent_tokens AS token
    WHERE token.kind = 'ephemeral'
        AND (token.expires_at < :expired_before OR token.revoked_at < :expired_before)
        AND NOT EXISTS (SELECT 1 FROM scaler_spawning_agents AS spawn WHERE spawn.agent_id = token.agent_id)
        AND (
            SELECT jobs.seq FROM jobs
            WHERE jobs.agent_id BETWEEN token.agent_id AND token.agent_id
                AND jobs.status IN ('dispatched', 'running', 'recovering', 'cancelling')
            ORDER BY jobs.agent_id, jobs.seq
            LIMIT 1
        ) IS NULL
    LIMIT :limit
)
RETURNING id;

-- name: create_api_token
-- Store a credential of the HTTP interface.
INSERT INTO api_tokens (id, token_hash, token_prefix, name, role, secret_contexts, created_at, expires_at)
VALUES (:id, :token_hash, :token_prefix, :name, :role, :secret_contexts, :created_at, :expires_at);

-- name: api_token
-- A credential of the HTTP interface by its hash.
SELECT * FROM api_tokens WHERE token_hash = :token_hash;

-- name: api_tokens
-- Credentials of the HTTP interface, newest first.
SELECT * FROM api_tokens ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: revoke_api_token
-- End a credential of the HTTP interface.
UPDATE api_tokens SET revoked_at = COALESCE(:now, now_ms())
WHERE id = :token_id AND revoked_at IS NULL
RETURNING id;
