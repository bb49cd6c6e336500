-- The whole schema, as all migrations together make it.  Nothing runs this file: it is for people, and a test compares it.

CREATE TABLE IF NOT EXISTS schema_migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at INTEGER NOT NULL
) STRICT;

-- Runs, jobs and the queue.
-- No foreign keys: rows that belong together are written and deleted in one unit.

CREATE TABLE demand_classes (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    demand TEXT NOT NULL
, used_at INTEGER NOT NULL DEFAULT 0) STRICT;

CREATE INDEX demand_classes_used ON demand_classes (used_at);

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    org TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'cancelling', 'success', 'failed', 'cancelled')),
    submitted_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    finished_at INTEGER,
    cancel_requested_at INTEGER,
    -- Jobs that are not over; the end that takes it to 0 ends the run.
    jobs_live INTEGER NOT NULL CHECK (jobs_live >= 0),
    jobs_cancelled INTEGER NOT NULL DEFAULT 0,
    -- Ended other than as success, skipped or cancelled.
    jobs_failed INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE INDEX runs_created ON runs (created_at);
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    org TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN (
        'pending', 'queued', 'dispatched', 'running', 'recovering', 'cancelling',
        'success', 'failed', 'cancelled', 'timed_out', 'unroutable', 'skipped'
    )),
    class_id INTEGER NOT NULL,
    -- Whether other jobs need it: without, its end concerns its run only.
    is_needed INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    queued_at INTEGER,
    expires_at INTEGER,
    agent_id TEXT,
    owner_instance_id TEXT,
    dispatched_at INTEGER,
    ack_deadline INTEGER,
    attempts INTEGER NOT NULL DEFAULT 0,
    recovery_deadline INTEGER,
    started_at INTEGER,
    finished_at INTEGER,
    exit_code INTEGER,
    signal INTEGER,
    reason TEXT,
    scaler TEXT,
    cancel_requested_at INTEGER,
    last_provisioning_error TEXT,
    unroutable_since INTEGER,
    needs TEXT NOT NULL,
    spec TEXT NOT NULL
, offers INTEGER NOT NULL DEFAULT 0) STRICT;

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
    need_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    PRIMARY KEY (need_id, job_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX job_needs_of_job ON job_needs (job_id);

CREATE TABLE idempotency_keys (
    key TEXT PRIMARY KEY,
    run_id TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_of_run ON idempotency_keys (run_id);

CREATE TABLE log_chunks (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    stream INTEGER NOT NULL,
    byte_offset INTEGER NOT NULL,
    received_at INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (job_id, stream, byte_offset)
) STRICT;

CREATE INDEX log_chunks_of_job ON log_chunks (job_id, position);

-- Spawns, agents and their credentials.

CREATE TABLE scaler_spawning_agents (
    agent_id TEXT PRIMARY KEY,
    scaler_name TEXT NOT NULL,
    backend_type TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('booting', 'registered', 'ending')),
    label_set TEXT NOT NULL,
    labels TEXT NOT NULL,
    mandatory_labels TEXT NOT NULL,
    shape TEXT NOT NULL,
    machine_pool TEXT,
    provisioning_targets TEXT NOT NULL,
    roles TEXT,
    token_id TEXT,
    owner_instance_id TEXT NOT NULL,
    worker_id TEXT,
    bound_job_id TEXT,
    run_id TEXT,
    org TEXT NOT NULL,
    job_image INTEGER NOT NULL,
    reuse_idle_seconds REAL,
    reuse_max_jobs INTEGER,
    spawned_at INTEGER NOT NULL,
    registered_at INTEGER,
    adopted_by TEXT,
    adopted_at INTEGER,
    destroy_requested_at INTEGER,
    end_reason TEXT
, emitted_at INTEGER) STRICT, WITHOUT ROWID;

-- Cluster-wide, no two spawns serve one job.
CREATE UNIQUE INDEX scaler_spawning_agents_serving ON scaler_spawning_agents (bound_job_id)
    WHERE state IN ('booting', 'registered');
CREATE INDEX scaler_spawning_agents_owner ON scaler_spawning_agents (owner_instance_id);

CREATE TABLE scaler_reservations (
    agent_id TEXT PRIMARY KEY,
    scaler_name TEXT NOT NULL,
    shape TEXT NOT NULL,
    machine_pool TEXT,
    owner_instance_id TEXT NOT NULL,
    reserved_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX scaler_reservations_owner ON scaler_reservations (owner_instance_id);

CREATE TABLE agent_sessions (
    agent_id TEXT PRIMARY KEY,
    instance_id TEXT NOT NULL,
    connection_id TEXT NOT NULL,
    labels TEXT NOT NULL,
    mandatory_labels TEXT NOT NULL,
    token_id TEXT,
    scaler_name TEXT,
    backend_type TEXT,
    facts TEXT NOT NULL,
    registered_at INTEGER NOT NULL,
    warm INTEGER NOT NULL
, incarnation TEXT NOT NULL DEFAULT '', connection_number INTEGER NOT NULL DEFAULT 0) STRICT, WITHOUT ROWID;

CREATE INDEX agent_sessions_instance ON agent_sessions (instance_id);

CREATE TABLE agent_tokens (
    id TEXT PRIMARY KEY,
    token_hash TEXT NOT NULL UNIQUE,
    token_prefix TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('static', 'ephemeral')),
    labels TEXT,
    mandatory_labels TEXT NOT NULL,
    agent_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    last_seen_at INTEGER,
    name TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX agent_tokens_agent ON agent_tokens (agent_id) WHERE agent_id IS NOT NULL;
CREATE INDEX agent_tokens_created ON agent_tokens (created_at);

CREATE TABLE api_tokens (
    id TEXT PRIMARY KEY,
    token_hash TEXT NOT NULL UNIQUE,
    token_prefix TEXT NOT NULL,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    secret_contexts TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    last_used_at INTEGER
) STRICT, WITHOUT ROWID;

-- The cluster and its settings.

CREATE TABLE cluster_instances (
    instance_id TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    version TEXT NOT NULL,
    address TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    last_beat_at INTEGER NOT NULL,
    draining INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- A released lease keeps its row: its token must only grow.
CREATE TABLE leases (
    name TEXT PRIMARY KEY,
    holder TEXT NOT NULL,
    token INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE cluster_settings (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE org_settings (
    org TEXT NOT NULL,
    name TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (org, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE scoped_secrets (
    org TEXT NOT NULL,
    context TEXT NOT NULL,
    key TEXT NOT NULL,
    sealed BLOB NOT NULL,
    key_version INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (org, context, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE access_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    outcome TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;

CREATE INDEX access_log_at ON access_log (at, id);

CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta (name, value) VALUES ('settings_version', '0');

-- What each coordinator could serve, as it last said: JSON of `domain.peer.Capacity`.
CREATE TABLE scaler_capacity (
    instance_id TEXT PRIMARY KEY,
    payload TEXT NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- What one coordinator asks of another; answered in place.
CREATE TABLE peer_requests (
    id TEXT PRIMARY KEY,
    target TEXT NOT NULL,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    answer TEXT,
    answered_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE INDEX peer_requests_waiting ON peer_requests (target, created_at) WHERE answered_at IS NULL;
CREATE INDEX peer_requests_expiry ON peer_requests (expires_at);

-- Events on their way to whoever subscribed, and what event scalers share.

CREATE INDEX scaler_spawning_agents_event ON scaler_spawning_agents (scaler_name, agent_id)
    WHERE backend_type = 'event';
CREATE INDEX scaler_spawning_agents_adopter ON scaler_spawning_agents (adopted_by) WHERE adopted_by IS NOT NULL;

CREATE TABLE kici_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    emission_id TEXT NOT NULL,
    name TEXT NOT NULL,
    subject TEXT,
    source TEXT NOT NULL,
    chain_depth INTEGER NOT NULL,
    target TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'awaiting', 'processed', 'dead', 'unmatched')),
    payload TEXT NOT NULL,
    -- Secret fields; erased when the event is handled.
    sealed BLOB,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    due_at INTEGER NOT NULL,
    claimed_by TEXT,
    claimed_until INTEGER,
    -- The claim before was not ended by its holder.
    is_reclaimed INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    failed_runs INTEGER NOT NULL DEFAULT 0,
    run_id TEXT,
    last_error TEXT,
    dead_at INTEGER,
    dead_reason TEXT,
    processed_at INTEGER
) STRICT;

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
    ref TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('workflow', 'webhook')),
    events TEXT NOT NULL,
    document TEXT NOT NULL,
    applied_by TEXT NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE scaler_pending_claims (
    claim_hash TEXT PRIMARY KEY,
    claim_prefix TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    scaler_name TEXT NOT NULL,
    labels TEXT NOT NULL,
    mandatory_labels TEXT NOT NULL,
    agent_token_ttl_ms INTEGER NOT NULL,
    orchestrator_url TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    consumed_at INTEGER,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX scaler_pending_claims_agent ON scaler_pending_claims (agent_id);
CREATE INDEX scaler_pending_claims_expiry ON scaler_pending_claims (expires_at);

-- What became of a provision, also when its row is gone.
CREATE TABLE scaler_provision_outcomes (
    agent_id TEXT PRIMARY KEY,
    scaler_name TEXT NOT NULL,
    adopted_by TEXT,
    adopted_at INTEGER,
    condemned_reason TEXT,
    condemned_at INTEGER,
    recorded_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX scaler_provision_outcomes_updated ON scaler_provision_outcomes (updated_at);

-- Event scalers that fail to provide machines; an agent of theirs that registers deletes the row.
CREATE TABLE scaler_deferrals (
    scaler_name TEXT PRIMARY KEY,
    failures INTEGER NOT NULL,
    until INTEGER NOT NULL,
    last_error TEXT NOT NULL,
    probe_agent_id TEXT,
    updated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE scaler_counted_failures (
    scaler_name TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    counted_at INTEGER NOT NULL,
    PRIMARY KEY (scaler_name, agent_id)
) STRICT, WITHOUT ROWID;

-- Addresses of microVMs.

CREATE TABLE ip_allocations (
    ip TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL UNIQUE,
    scaler_name TEXT NOT NULL,
    owner_instance_id TEXT NOT NULL,
    tap_device TEXT NOT NULL,
    mac_address TEXT NOT NULL,
    allocated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

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
