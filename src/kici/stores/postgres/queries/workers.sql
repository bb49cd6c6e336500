-- name: create_join_token
-- A one-time token that makes a host a worker.
INSERT INTO join_tokens (id, token_hash, role, created_by, created_at, expires_at)
VALUES (:id, :token_hash, :role, :created_by, :created_at, :expires_at);

-- name: use_join_token
-- Trade a token that is neither expired nor used by another.
UPDATE join_tokens SET used_by = :worker_id, used_at = COALESCE(used_at, :now, now_ms())
WHERE token_hash = :token_hash AND role = :role
    AND expires_at > COALESCE(:now, now_ms())
    AND (used_by IS NULL OR used_by = :worker_id)
RETURNING id;

-- name: void_join_tokens
-- Tokens that a worker used are good no more.
UPDATE join_tokens SET expires_at = 0 WHERE used_by = :worker_id;

-- name: join_tokens
-- Tokens that have not run out, oldest first.
SELECT * FROM join_tokens WHERE expires_at > COALESCE(:now, now_ms()) ORDER BY created_at, id LIMIT :limit;

-- name: revoke_join_token
-- A token is good no more, before its time.
UPDATE join_tokens SET expires_at = 0 WHERE id = :id AND expires_at > COALESCE(:now, now_ms())
RETURNING id;

-- name: purge_join_tokens
-- Forget tokens that ran out a day ago.
DELETE FROM join_tokens WHERE expires_at < COALESCE(:now, now_ms()) - 86400000
RETURNING id;

-- name: put_worker
-- A host is a worker from now on, with a new credential.
INSERT INTO workers (worker_id, name, version, credential_hash, joined_at)
VALUES (:worker_id, :name, :version, :credential_hash, COALESCE(:now, now_ms()))
ON CONFLICT (worker_id) DO UPDATE SET
    name = excluded.name,
    version = excluded.version,
    credential_hash = excluded.credential_hash,
    joined_at = excluded.joined_at,
    revoked_at = NULL;

-- name: worker
-- One worker.
SELECT * FROM workers WHERE worker_id = :worker_id;

-- name: workers
-- All workers, revoked ones too.
SELECT * FROM workers ORDER BY worker_id LIMIT :limit;

-- name: worker_links
-- Which coordinators are linked to which workers.
SELECT * FROM worker_links ORDER BY worker_id, seen_at DESC, instance_id LIMIT :limit;

-- name: revoke_worker
-- A worker is none any more.
UPDATE workers SET revoked_at = COALESCE(:now, now_ms())
WHERE worker_id = :worker_id AND revoked_at IS NULL
RETURNING worker_id;

-- name: link_workers
-- Workers that are linked to a coordinator, still; those that are workers still.
INSERT INTO worker_links (worker_id, instance_id, seen_at)
SELECT worker_id, :instance_id::TEXT, COALESCE(:now, now_ms()) FROM workers
WHERE worker_id = ANY (ARRAY(SELECT json_array_elements_text(:worker_ids::JSON))) AND revoked_at IS NULL
ON CONFLICT (worker_id, instance_id) DO UPDATE SET seen_at = excluded.seen_at
RETURNING worker_id;

-- name: unlink_worker
-- A worker is not linked to a coordinator (None: to any) any more.
DELETE FROM worker_links
WHERE worker_id = :worker_id AND (:instance_id::TEXT IS NULL OR instance_id = :instance_id);

-- name: lock_worker
-- One coordinator at a time takes over agents of a worker.
SELECT worker_id FROM workers WHERE worker_id = :worker_id FOR UPDATE;

-- name: take_over_worker_spawns
-- Rows of a worker whose owner is not linked to it are ours, if we are; or if the worker is none any more.
UPDATE scaler_spawning_agents SET owner_instance_id = :to
WHERE worker_id = :worker_id AND owner_instance_id <> :to
    AND NOT EXISTS (
        SELECT 1 FROM worker_links
        WHERE worker_links.worker_id = :worker_id
            AND worker_links.instance_id = scaler_spawning_agents.owner_instance_id
            AND worker_links.seen_at >= COALESCE(:now, now_ms()) - :fresh_ms
    )
    AND (
        EXISTS (
            SELECT 1 FROM worker_links
            WHERE worker_links.worker_id = :worker_id AND worker_links.instance_id = :to
                AND worker_links.seen_at >= COALESCE(:now, now_ms()) - :fresh_ms
        )
        OR EXISTS (
            SELECT 1 FROM workers WHERE workers.worker_id = :worker_id AND workers.revoked_at IS NOT NULL
        )
    )
RETURNING *;

-- name: take_over_worker_reservations
-- What they hold goes with them.
UPDATE scaler_reservations SET owner_instance_id = :to
WHERE owner_instance_id <> :to AND agent_id IN (
    SELECT agent_id FROM scaler_spawning_agents WHERE worker_id = :worker_id AND owner_instance_id = :to
)
RETURNING *;
