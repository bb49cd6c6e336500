-- name: record_access
-- Who did what.
INSERT INTO access_log (at, actor, action, target, outcome, detail)
VALUES (:at, :actor, :action, :target, :outcome, :detail);

-- name: access_log
-- Page of the access log, newest first.
SELECT * FROM access_log
WHERE (at, id) < (COALESCE(:before, 9223372036854775807), COALESCE(:before_id, 0))
ORDER BY at DESC, id DESC
LIMIT :limit;

-- name: prune_access_log
-- Forget what happened before a time, the oldest first.
DELETE FROM access_log
WHERE id = ANY (
    ARRAY(SELECT old.id FROM access_log AS old WHERE old.at < :older_than ORDER BY old.at, old.id LIMIT :limit)
)
RETURNING id;
