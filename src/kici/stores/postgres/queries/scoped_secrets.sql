-- name: put_secret
-- Store a sealed secret, or seal it anew.
INSERT INTO scoped_secrets (org, context, key, sealed, key_version, updated_at)
VALUES (:org, :context, :key, :sealed, :key_version, :updated_at)
ON CONFLICT (org, context, key) DO UPDATE SET
    sealed = excluded.sealed,
    key_version = excluded.key_version,
    updated_at = excluded.updated_at;

-- name: secret
-- One sealed secret.
SELECT * FROM scoped_secrets WHERE org = :org AND context = :context AND key = :key;

-- name: secrets
-- Sealed secrets of an org.
SELECT * FROM scoped_secrets WHERE org = :org ORDER BY context, key LIMIT :limit;

-- name: secrets_of_all
-- Sealed secrets of every org, after one of them.
SELECT * FROM scoped_secrets
WHERE (org, context, key) > (:org, :context, :key) ORDER BY org, context, key LIMIT :limit;

-- name: reseal_secret
-- Replace what was sealed before, unless somebody stored another value since.
UPDATE scoped_secrets SET sealed = :sealed, key_version = :key_version
WHERE org = :org AND context = :context AND key = :key AND sealed = :before RETURNING key;

-- name: delete_secret
-- Forget a secret.
DELETE FROM scoped_secrets WHERE org = :org AND context = :context AND key = :key RETURNING key;
