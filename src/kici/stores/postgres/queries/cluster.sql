-- name: beat
-- An instance is alive.
INSERT INTO cluster_instances (instance_id, role, version, address, started_at, last_beat_at, draining)
VALUES (:instance_id, :role, :version, :address, :started_at, COALESCE(:now, now_ms()), :draining)
ON CONFLICT (instance_id) DO UPDATE SET
    role = excluded.role,
    version = excluded.version,
    address = excluded.address,
    started_at = excluded.started_at,
    last_beat_at = excluded.last_beat_at,
    draining = excluded.draining;

-- name: remove_instance
-- An instance stopped cleanly, or was forgotten.
DELETE FROM cluster_instances WHERE instance_id = :instance_id;

-- name: instances
-- All instances, live or not.
SELECT * FROM cluster_instances ORDER BY instance_id LIMIT :limit;

-- name: database_now
-- The database's clock.
SELECT now_ms() AS now;

-- name: acquire_lease
-- Take a lease that is free or has run out (next token), or renew a running one of one's own (same token).
INSERT INTO leases (name, holder, token, expires_at)
VALUES (:name, :holder, 1, COALESCE(:now, now_ms()) + :ttl_ms::BIGINT)
ON CONFLICT (name) DO UPDATE SET
    holder = excluded.holder,
    token = leases.token + (leases.expires_at <= COALESCE(:now, now_ms()))::INTEGER,
    expires_at = excluded.expires_at
WHERE leases.holder = excluded.holder OR leases.expires_at <= COALESCE(:now, now_ms())
RETURNING *;

-- name: release_lease
-- Give a lease up before it runs out.
UPDATE leases SET expires_at = 0
WHERE name = :name AND holder = :holder AND token = :token AND expires_at > 0
RETURNING name;

-- name: lease
-- Who holds a duty, or held it last.
SELECT * FROM leases WHERE name = :name;
