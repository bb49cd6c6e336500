-- Coordinators tell each other what they could serve, and ask each other for acts.
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
