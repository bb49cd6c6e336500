-- name: ping
-- Does the store answer?
SELECT 1 AS answer;

-- name: migrations_applied
-- Numbers of the migrations that this database has seen.
SELECT number FROM schema_migrations ORDER BY number;

-- name: record_migration
-- A migration was applied.
INSERT INTO schema_migrations (number, name, applied_at) VALUES (:number, :name, now_ms());
