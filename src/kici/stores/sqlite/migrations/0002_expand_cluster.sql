-- Coordinators tell each other what they could serve, and ask each other for acts.
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
