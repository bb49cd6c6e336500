-- Run before the numbered migrations are looked at, in the same transaction: one migrator at a time.
SELECT pg_advisory_xact_lock(7239847298734);
CREATE TABLE IF NOT EXISTS schema_migrations (
    number BIGINT PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at BIGINT NOT NULL
);
