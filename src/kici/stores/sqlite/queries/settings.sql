-- name: cluster_settings
-- Values set for the cluster.
SELECT name, value FROM cluster_settings;

-- name: org_settings
-- Values set for an org.
SELECT name, value FROM org_settings WHERE org = :org;

-- name: lock_settings
-- Let one patch at a time look at what it changes.
SELECT value FROM meta WHERE name = 'settings_version';

-- name: bump_settings
-- Raise the version, if the changes change anything.  A null clears.
UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)
WHERE name = 'settings_version'
    AND EXISTS (
        SELECT 1
        FROM json_each(:changes) AS change
        WHERE json_extract(change.value, '$.value') IS NOT (
            SELECT value FROM cluster_settings
            WHERE :org IS NULL AND name = json_extract(change.value, '$.name')
            UNION ALL
            SELECT value FROM org_settings
            WHERE org = :org AND name = json_extract(change.value, '$.name')
        )
    )
RETURNING value;

-- name: patch_cluster_settings
-- Apply changes to the cluster's values.
INSERT INTO cluster_settings (name, value)
SELECT json_extract(change.value, '$.name'), json_extract(change.value, '$.value')
FROM json_each(:changes) AS change
WHERE json_extract(change.value, '$.value') IS NOT NULL
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: clear_cluster_settings
-- Take the cleared ones of the cluster's values away.
DELETE FROM cluster_settings
WHERE name IN (
    SELECT json_extract(value, '$.name') FROM json_each(:changes) WHERE json_extract(value, '$.value') IS NULL
);

-- name: patch_org_settings
-- Apply changes to an org's values.
INSERT INTO org_settings (org, name, value)
SELECT :org, json_extract(change.value, '$.name'), json_extract(change.value, '$.value')
FROM json_each(:changes) AS change
WHERE json_extract(change.value, '$.value') IS NOT NULL
ON CONFLICT (org, name) DO UPDATE SET value = excluded.value;

-- name: clear_org_settings
-- Take the cleared ones of an org's values away.
DELETE FROM org_settings
WHERE org = :org
    AND name IN (
        SELECT json_extract(value, '$.name') FROM json_each(:changes) WHERE json_extract(value, '$.value') IS NULL
    );

-- name: meta
-- A small fact of the installation.
SELECT value FROM meta WHERE name = :name;

-- name: set_meta
-- Record a small fact of the installation.
INSERT INTO meta (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
