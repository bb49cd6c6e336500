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
