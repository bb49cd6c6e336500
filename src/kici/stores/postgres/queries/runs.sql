-- name: run
-- One run.
SELECT * FROM runs WHERE id = :run_id;

-- name: run_of_key
-- The run that an idempotency key made.
SELECT run_id FROM idempotency_keys WHERE key = :key;

-- name: runs_listed
-- Page of runs, newest first.
SELECT * FROM runs
WHERE (created_at, id) < (COALESCE(:before, 9223372036854775807), COALESCE(:before_id, ''))
ORDER BY created_at DESC, id DESC
LIMIT :limit;
