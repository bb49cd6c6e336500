-- name: cluster_settings
-- Values set for the cluster.
SELECT name, value FROM cluster_settings;

-- name: org_settings
-- Values set for an org.
SELECT name, value FROM org_settings WHERE org = :org;

-- name: lock_settings
-- Let one patch at a time look at what it changes.
SELECT value FROM meta WHERE name = 'settings_version' FOR UPDATE;

-- name: bump_settings
-- Raise the version, if the changes change anything.  A null clears.
UPDATE meta SET value = (value::BIGINT + 1)::TEXT
WHERE name = 'settings_version'
    AND EXISTS (
        SELECT 1
        FROM json_to_recordset(:changes::JSON) AS change (name TEXT, value BIGINT)
        WHERE change.value IS DISTINCT FROM (
            SELECT cluster_settings.value FROM cluster_settings
            WHERE :org::TEXT IS NULL AND cluster_settings.name = change.name
            UNION ALL
            SELECT org_settings.value FROM org_settings
            WHERE org_settings.org = :org AND org_settings.name = change.name
        )
    )
RETURNING value;

-- name: patch_cluster_settings
-- Apply changes to the cluster's values.
INSERT INTO cluster_settings (name, value)
SELECT change.name, change.value
FROM json_to_recordset(:changes::JSON) AS change (name TEXT, value BIGINT)
WHERE change.value IS NOT NULL
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: clear_cluster_settings
-- Take the cleared ones of the cluster's values away.
DELETE FROM cluster_settings
USING json_to_recordset(:changes::JSON) AS change (name TEXT, value BIGINT)
WHERE cluster_settings.name = change.name AND change.value IS NULL;

-- name: patch_org_settings
-- Apply changes to an org's values.
INSERT INTO org_settings (org, name, value)
SELECT :org, change.name, change.value
FROM json_to_recordset(:changes::JSON) AS change (name TEXT, value BIGINT)
WHERE change.value IS NOT NULL
ON CONFLICT (org, name) DO UPDATE SET value = excluded.value;

-- name: clear_org_settings
-- Take the cleared ones of an org's values away.
DELETE FROM org_settings
USING json_to_recordset(:changes::JSON) AS change (name TEXT, value BIGINT)
WHERE org_settings.org = :org AND org_settings.name = change.name AND change.value IS NULL;

-- name: meta
-- A small fact of the installation.
SELECT value FROM meta WHERE name = :name;

-- name: set_meta
-- Record a small fact of the installation.
INSERT INTO meta (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
