-- Workers: hosts that make agents for coordinators, and have no database.

-- One-time tokens that make a host a worker; only their hashes.
CREATE TABLE join_tokens (
    id TEXT PRIMARY KEY,
    token_hash TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    used_by TEXT,
    used_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE INDEX join_tokens_expiry ON join_tokens (expires_at);

CREATE TABLE workers (
    worker_id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    credential_hash TEXT NOT NULL,
    joined_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

-- Which coordinators are linked to which workers, as those last said.
CREATE TABLE worker_links (
    worker_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (worker_id, instance_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX scaler_spawning_agents_worker ON scaler_spawning_agents (worker_id) WHERE worker_id IS NOT NULL;
