-- Workers: hosts that make agents for coordinators, and have no database.

-- One-time tokens that make a host a worker; only their hashes.
CREATE TABLE join_tokens (
    id TEXT COLLATE "C" PRIMARY KEY,
    token_hash TEXT COLLATE "C" NOT NULL UNIQUE,
    role TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    used_by TEXT COLLATE "C",
    used_at BIGINT
);

CREATE INDEX join_tokens_expiry ON join_tokens (expires_at);

CREATE TABLE workers (
    worker_id TEXT COLLATE "C" PRIMARY KEY,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    credential_hash TEXT NOT NULL,
    joined_at BIGINT NOT NULL,
    revoked_at BIGINT
);

-- Which coordinators are linked to which workers, as those last said.
CREATE TABLE worker_links (
    worker_id TEXT COLLATE "C" NOT NULL,
    instance_id TEXT COLLATE "C" NOT NULL,
    seen_at BIGINT NOT NULL,
    PRIMARY KEY (worker_id, instance_id)
);

CREATE INDEX scaler_spawning_agents_worker ON scaler_spawning_agents (worker_id) WHERE worker_id IS NOT NULL;
