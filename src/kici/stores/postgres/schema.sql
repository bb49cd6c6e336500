-- The whole schema, as all migrations together make it.  Nothing runs this file: it is for people, and a test compares it.

CREATE TABLE IF NOT EXISTS schema_migrations (
    number BIGINT PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at BIGINT NOT NULL
);

-- Texts that are compared or ordered have the collation "C", so that every database orders them alike.

-- The database's clock, as every statement reads it: ms since the epoch, at the start of the statement.
CREATE FUNCTION now_ms() RETURNS BIGINT LANGUAGE sql STABLE AS
    'SELECT (EXTRACT(EPOCH FROM statement_timestamp()) * 1000)::BIGINT';

-- Runs, jobs and the queue.
-- No foreign keys: rows that belong together are written and deleted in one unit.

CREATE TABLE demand_classes (
    id BIGINT PRIMARY KEY,
    key TEXT COLLATE "C" NOT NULL UNIQUE,
    demand TEXT NOT NULL,
    used_at BIGINT NOT NULL DEFAULT now_ms()
);

CREATE INDEX demand_classes_used ON demand_classes (used_at);

CREATE TABLE runs (
    id TEXT COLLATE "C" PRIMARY KEY,
    name TEXT NOT NULL,
    org TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL CHECK (status IN ('running', 'cancelling', 'success', 'failed', 'cancelled')),
    submitted_by TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    finished_at BIGINT,
    cancel_requested_at BIGINT,
    -- Jobs that are not over; the end that takes it to 0 ends the run.
    jobs_live INTEGER NOT NULL CHECK (jobs_live >= 0),
    jobs_cancelled INTEGER NOT NULL DEFAULT 0,
    -- Ended other than as success, skipped or cancelled.
    jobs_failed INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX runs_created ON runs (created_at);
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE jobs (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id TEXT COLLATE "C" NOT NULL UNIQUE,
    run_id TEXT COLLATE "C" NOT NULL,
    name TEXT NOT NULL,
    org TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL CHECK (status IN (
        'pending', 'queued', 'dispatched', 'running', 'recovering', 'cancelling',
        'success', 'failed', 'cancelled', 'timed_out', 'unroutable', 'skipped'
    )),
    class_id BIGINT NOT NULL,
    -- Whether other jobs need it: without, its end concerns its run only.
    is_needed BOOLEAN NOT NULL,
    created_at BIGINT NOT NULL,
    queued_at BIGINT,
    expires_at BIGINT,
    agent_id TEXT COLLATE "C",
    owner_instance_id TEXT COLLATE "C",
    dispatched_at BIGINT,
    ack_deadline BIGINT,
    attempts INTEGER NOT NULL DEFAULT 0,
    recovery_deadline BIGINT,
    started_at BIGINT,
    finished_at BIGINT,
    exit_code BIGINT,
    signal INTEGER,
    reason TEXT,
    scaler TEXT,
    cancel_requested_at BIGINT,
    last_provisioning_error TEXT,
    unroutable_since BIGINT,
    needs TEXT NOT NULL,
    spec TEXT NOT NULL,
    offers INTEGER NOT NULL DEFAULT 0
);

-- Rows of a queue die young: clean up early, or the heads of the indexes fill with the dead.
ALTER TABLE jobs SET (
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_analyze_scale_factor = 0.05
);

CREATE INDEX jobs_queue ON jobs (class_id, seq) WHERE status = 'queued';
CREATE INDEX jobs_of_run ON jobs (run_id, seq);
CREATE INDEX jobs_by_status ON jobs (status, seq);
CREATE INDEX jobs_held ON jobs (agent_id, seq)
    WHERE status IN ('dispatched', 'running', 'recovering', 'cancelling');
CREATE INDEX jobs_owned ON jobs (owner_instance_id, seq)
    WHERE status IN ('dispatched', 'running', 'recovering', 'cancelling');
CREATE INDEX jobs_ack ON jobs (ack_deadline, seq) WHERE ack_deadline IS NOT NULL;
CREATE INDEX jobs_recovery ON jobs (recovery_deadline, seq) WHERE recovery_deadline IS NOT NULL;
CREATE INDEX jobs_expiry ON jobs (expires_at, seq)
    WHERE status IN ('pending', 'queued') AND expires_at IS NOT NULL;
CREATE INDEX jobs_unroutable ON jobs (class_id, unroutable_since, seq) WHERE unroutable_since IS NOT NULL;

CREATE TABLE job_needs (
    need_id TEXT COLLATE "C" NOT NULL,
    job_id TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (need_id, job_id)
);

CREATE INDEX job_needs_of_job ON job_needs (job_id);

CREATE TABLE idempotency_keys (
    key TEXT COLLATE "C" PRIMARY KEY,
    run_id TEXT COLLATE "C" NOT NULL
);

CREATE INDEX idempotency_keys_of_run ON idempotency_keys (run_id);

CREATE TABLE log_chunks (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id TEXT COLLATE "C" NOT NULL,
    stream SMALLINT NOT NULL,
    byte_offset BIGINT NOT NULL,
    received_at BIGINT NOT NULL,
    data BYTEA NOT NULL,
    UNIQUE (job_id, stream, byte_offset)
);

CREATE INDEX log_chunks_of_job ON log_chunks (job_id, position);

-- Spawns, agents and their credentials.

CREATE TABLE scaler_spawning_agents (
    agent_id TEXT COLLATE "C" PRIMARY KEY,
    scaler_name TEXT NOT NULL,
    backend_type TEXT NOT NULL,
    state TEXT COLLATE "C" NOT NULL CHECK (state IN ('booting', 'registered', 'ending')),
    label_set TEXT NOT NULL,
    labels TEXT NOT NULL,
    mandatory_labels TEXT NOT NULL,
    shape TEXT NOT NULL,
    machine_pool TEXT,
    provisioning_targets TEXT NOT NULL,
    roles TEXT,
    token_id TEXT,
    owner_instance_id TEXT COLLATE "C" NOT NULL,
    worker_id TEXT,
    bound_job_id TEXT COLLATE "C",
    run_id TEXT COLLATE "C",
    org TEXT COLLATE "C" NOT NULL,
    job_image BOOLEAN NOT NULL,
    reuse_idle_seconds DOUBLE PRECISION,
    reuse_max_jobs INTEGER,
    spawned_at BIGINT NOT NULL,
    registered_at BIGINT,
    adopted_by TEXT,
    adopted_at BIGINT,
    destroy_requested_at BIGINT,
    end_reason TEXT,
    emitted_at BIGINT
);

-- Cluster-wide, no two spawns serve one job.
CREATE UNIQUE INDEX scaler_spawning_agents_serving ON scaler_spawning_agents (bound_job_id)
    WHERE state IN ('booting', 'registered');
CREATE INDEX scaler_spawning_agents_owner ON scaler_spawning_agents (owner_instance_id);

CREATE TABLE scaler_reservations (
    agent_id TEXT COLLATE "C" PRIMARY KEY,
    scaler_name TEXT NOT NULL,
    shape TEXT NOT NULL,
    machine_pool TEXT,
    owner_instance_id TEXT COLLATE "C" NOT NULL,
    reserved_at BIGINT NOT NULL
);

CREATE INDEX scaler_reservations_owner ON scaler_reservations (owner_instance_id);

CREATE TABLE agent_sessions (
    agent_id TEXT COLLATE "C" PRIMARY KEY,
    instance_id TEXT COLLATE "C" NOT NULL,
    connection_id TEXT COLLATE "C" NOT NULL,
    labels TEXT NOT NULL,
    mandatory_labels TEXT NOT NULL,
    token_id TEXT,
    scaler_name TEXT,
    backend_type TEXT,
    facts TEXT NOT NULL,
    registered_at BIGINT NOT NULL,
    warm BOOLEAN NOT NULL,
    incarnation TEXT NOT NULL DEFAULT '',
    connection_number BIGINT NOT NULL DEFAULT 0
);

CREATE INDEX agent_sessions_instance ON agent_sessions (instance_id);

CREATE TABLE agent_tokens (
    id TEXT COLLATE "C" PRIMARY KEY,
    token_hash TEXT COLLATE "C" NOT NULL UNIQUE,
    token_prefix TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('static', 'ephemeral')),
    labels TEXT,
    mandatory_labels TEXT NOT NULL,
    agent_id TEXT COLLATE "C",
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT,
    last_seen_at BIGINT,
    name TEXT NOT NULL
);

CREATE INDEX agent_tokens_agent ON agent_tokens (agent_id) WHERE agent_id IS NOT NULL;
CREATE INDEX agent_tokens_created ON agent_tokens (created_at);

CREATE TABLE api_tokens (
    id TEXT COLLATE "C" PRIMARY KEY,
    token_hash TEXT COLLATE "C" NOT NULL UNIQUE,
    token_prefix TEXT NOT NULL,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    secret_contexts TEXT,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT,
    last_used_at BIGINT
);

-- The cluster and its settings.

CREATE TABLE cluster_instances (
    instance_id TEXT COLLATE "C" PRIMARY KEY,
    role TEXT NOT NULL,
    version TEXT NOT NULL,
    address TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    last_beat_at BIGINT NOT NULL,
    draining BOOLEAN NOT NULL
);

-- A released lease keeps its row: its token must only grow.
CREATE TABLE leases (
    name TEXT COLLATE "C" PRIMARY KEY,
    holder TEXT COLLATE "C" NOT NULL,
    token BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);

CREATE TABLE cluster_settings (
    name TEXT COLLATE "C" PRIMARY KEY,
    value BIGINT NOT NULL
);

CREATE TABLE org_settings (
    org TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (org, name)
);

CREATE TABLE scoped_secrets (
    org TEXT COLLATE "C" NOT NULL,
    context TEXT COLLATE "C" NOT NULL,
    key TEXT COLLATE "C" NOT NULL,
    sealed BYTEA NOT NULL,
    key_version INTEGER NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (org, context, key)
);

CREATE TABLE access_log (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at BIGINT NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    outcome TEXT NOT NULL,
    detail TEXT NOT NULL
);

CREATE INDEX access_log_at ON access_log (at, id);

CREATE TABLE meta (
    name TEXT COLLATE "C" PRIMARY KEY,
    value TEXT NOT NULL
);

INSERT INTO meta (name, value) VALUES ('settings_version', '0');

-- What each coordinator could serve, as it last said: JSON of `domain.peer.Capacity`.
CREATE TABLE scaler_capacity (
    instance_id TEXT COLLATE "C" PRIMARY KEY,
    payload TEXT NOT NULL,
    updated_at BIGINT NOT NULL
);

-- What one coordinator asks of another; answered in place.
CREATE TABLE peer_requests (
    id TEXT COLLATE "C" PRIMARY KEY,
    target TEXT COLLATE "C" NOT NULL,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    answer TEXT,
    answered_at BIGINT
);

CREATE INDEX peer_requests_waiting ON peer_requests (target, created_at) WHERE answered_at IS NULL;
CREATE INDEX peer_requests_expiry ON peer_requests (expires_at);

-- Events on their way to whoever subscribed, and what event scalers share.

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

-- Addresses of microVMs.

CREATE TABLE ip_allocations (
    ip TEXT COLLATE "C" PRIMARY KEY,
    vm_id TEXT COLLATE "C" NOT NULL UNIQUE,
    scaler_name TEXT COLLATE "C" NOT NULL,
    owner_instance_id TEXT COLLATE "C" NOT NULL,
    tap_device TEXT NOT NULL,
    mac_address TEXT NOT NULL,
    allocated_at BIGINT NOT NULL
);

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

-- Whether an event scaler may have one more agent in the whole cluster, asked under its lock, which is held to the end
-- of the transaction.  A function, because each statement of one sees what was committed until it began: a count that
-- is part of the statement that waits for the lock would be as of before the wait.
CREATE FUNCTION has_event_slot(
    lock_name TEXT, lock_wait_ms BIGINT, scaler TEXT, agents_max BIGINT, may_probe BOOLEAN, at_ms BIGINT
) RETURNS BOOLEAN LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('lock_timeout', lock_wait_ms::TEXT, TRUE);
    PERFORM pg_advisory_xact_lock(hashtextextended(lock_name, 0));
    RETURN (
            SELECT count(*) FROM scaler_spawning_agents AS spawn
            WHERE spawn.scaler_name = scaler AND spawn.backend_type = 'event'
        ) < agents_max
        AND NOT EXISTS (
            SELECT 1 FROM scaler_deferrals AS deferral
            WHERE deferral.scaler_name = scaler AND deferral.failures > 0 AND (
                (deferral.until > at_ms AND NOT may_probe)
                OR EXISTS (
                    SELECT 1 FROM scaler_spawning_agents AS probe
                    WHERE probe.agent_id = deferral.probe_agent_id AND probe.state = 'booting'
                )
            )
        );
END $$;
