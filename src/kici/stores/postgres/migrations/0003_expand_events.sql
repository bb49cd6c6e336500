-- Events on their way to whoever subscribed, and what event scalers share.

ALTER TABLE scaler_spawning_agents ADD COLUMN emitted_at BIGINT;

CREATE INDEX scaler_spawning_agents_event ON scaler_spawning_agents (scaler_name, agent_id)
    WHERE backend_type = 'event';
CREATE INDEX scaler_spawning_agents_adopter ON scaler_spawning_agents (adopted_by) WHERE adopted_by IS NOT NULL;

CREATE TABLE kici_events (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id TEXT COLLATE "C" NOT NULL UNIQUE,
    emission_id TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    subject TEXT COLLATE "C",
    source TEXT COLLATE "C" NOT NULL,
    chain_depth INTEGER NOT NULL,
    target TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL CHECK (state IN ('pending', 'awaiting', 'processed', 'dead', 'unmatched')),
    payload TEXT NOT NULL,
    -- Secret fields; erased when the event is handled.
    sealed BYTEA,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    due_at BIGINT NOT NULL,
    claimed_by TEXT COLLATE "C",
    claimed_until BIGINT,
    -- The claim before was not ended by its holder.
    is_reclaimed BOOLEAN NOT NULL DEFAULT FALSE,
    attempts INTEGER NOT NULL DEFAULT 0,
    failed_runs INTEGER NOT NULL DEFAULT 0,
    run_id TEXT COLLATE "C",
    last_error TEXT,
    dead_at BIGINT,
    dead_reason TEXT,
    processed_at BIGINT
);

CREATE INDEX kici_events_due ON kici_events (due_at, seq) WHERE state = 'pending';
CREATE INDEX kici_events_awaiting ON kici_events (seq) WHERE state = 'awaiting';
CREATE INDEX kici_events_dead ON kici_events (seq) WHERE state = 'dead';
CREATE INDEX kici_events_subject ON kici_events (subject, target, seq) WHERE subject IS NOT NULL;
CREATE INDEX kici_events_emission ON kici_events (emission_id);
CREATE INDEX kici_events_run ON kici_events (run_id) WHERE run_id IS NOT NULL;
CREATE INDEX kici_events_rate ON kici_events (source, name, created_at) WHERE source <> '';
CREATE INDEX kici_events_handled ON kici_events (created_at) WHERE state IN ('processed', 'unmatched');
-- One live event of a name for each subject and target.
CREATE UNIQUE INDEX kici_events_live ON kici_events (subject, name, target)
    WHERE subject IS NOT NULL AND state IN ('pending', 'awaiting');

CREATE TABLE workflow_registrations (
    ref TEXT COLLATE "C" PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('workflow', 'webhook')),
    events TEXT NOT NULL,
    document TEXT NOT NULL,
    applied_by TEXT NOT NULL,
    updated_at BIGINT NOT NULL
);

CREATE TABLE scaler_pending_claims (
    claim_hash TEXT COLLATE "C" PRIMARY KEY,
    claim_prefix TEXT NOT NULL,
    agent_id TEXT COLLATE "C" NOT NULL,
    scaler_name TEXT COLLATE "C" NOT NULL,
    labels TEXT NOT NULL,
    mandatory_labels TEXT NOT NULL,
    agent_token_ttl_ms BIGINT NOT NULL,
    orchestrator_url TEXT NOT NULL,
    expires_at BIGINT NOT NULL,
    consumed_at BIGINT,
    created_at BIGINT NOT NULL
);

CREATE INDEX scaler_pending_claims_agent ON scaler_pending_claims (agent_id);
CREATE INDEX scaler_pending_claims_expiry ON scaler_pending_claims (expires_at);

-- What became of a provision, also when its row is gone.
CREATE TABLE scaler_provision_outcomes (
    agent_id TEXT COLLATE "C" PRIMARY KEY,
    scaler_name TEXT COLLATE "C" NOT NULL,
    adopted_by TEXT,
    adopted_at BIGINT,
    condemned_reason TEXT,
    condemned_at BIGINT,
    recorded_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL
);

CREATE INDEX scaler_provision_outcomes_updated ON scaler_provision_outcomes (updated_at);

-- Event scalers that fail to provide machines; an agent of theirs that registers deletes the row.
CREATE TABLE scaler_deferrals (
    scaler_name TEXT COLLATE "C" PRIMARY KEY,
    failures INTEGER NOT NULL,
    until BIGINT NOT NULL,
    last_error TEXT NOT NULL,
    probe_agent_id TEXT COLLATE "C",
    updated_at BIGINT NOT NULL
);

CREATE TABLE scaler_counted_failures (
    scaler_name TEXT COLLATE "C" NOT NULL,
    agent_id TEXT COLLATE "C" NOT NULL,
    counted_at BIGINT NOT NULL,
    PRIMARY KEY (scaler_name, agent_id)
);
