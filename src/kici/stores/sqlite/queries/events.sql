-- name: limit_lock_wait
-- How long this unit may wait for a lock.  Here units wait for nobody.
SELECT :lock_wait_ms AS lock_wait_ms;

-- name: take_lock
-- Let one unit at a time go on that names this lock.  Here there is only one at a time.
SELECT :lock_name AS lock_name;

-- name: emit_event
-- Write an event for each of its targets, unless its source has emitted too many of this name in a minute.
INSERT INTO kici_events (
    id, emission_id, name, subject, source, chain_depth, target, state, payload, sealed, created_at, due_at, expires_at
)
SELECT
    row.value ->> 'id', :emission_id, :name, :subject, :source, :chain_depth, row.value ->> 'target',
    row.value ->> 'state', :payload, :sealed, COALESCE(:now, now_ms()), COALESCE(:now, now_ms()),
    COALESCE(:now, now_ms()) + :expires_in_ms
FROM json_each(:rows) AS row
WHERE :rate_max IS NULL OR (
    SELECT count(DISTINCT emission_id) FROM kici_events AS before INDEXED BY kici_events_rate
    WHERE before.source = :source AND before.source <> '' AND before.name = :name
        AND before.created_at > COALESCE(:now, now_ms()) - 60000
) < :rate_max
ON CONFLICT (subject, name, target) WHERE subject IS NOT NULL AND state IN ('pending', 'awaiting') DO NOTHING
RETURNING id, emission_id;

-- name: claim_events
-- Take events that are due for delivery, oldest first.  One of a subject and target follows the one before.
UPDATE kici_events SET
    claimed_by = :instance_id,
    is_reclaimed = claimed_until IS NOT NULL,
    claimed_until = COALESCE(:now, now_ms()) + :lease_ms,
    attempts = attempts + 1
WHERE seq IN (
    SELECT due.seq FROM kici_events AS due INDEXED BY kici_events_due
    WHERE due.state = 'pending' AND due.due_at <= COALESCE(:now, now_ms())
        AND (due.claimed_until IS NULL OR due.claimed_until <= COALESCE(:now, now_ms()))
        AND NOT EXISTS (
            SELECT 1 FROM kici_events AS older
            WHERE older.subject = due.subject AND older.target = due.target AND older.seq < due.seq
                AND (older.state IN ('pending', 'awaiting') OR older.claimed_until > COALESCE(:now, now_ms()))
        )
    ORDER BY due.due_at, due.seq
    LIMIT :limit
)
RETURNING *, COALESCE(expires_at <= COALESCE(:now, now_ms()), FALSE) AS is_expired;

-- name: await_event
-- A run is about to be started for a claimed event.
UPDATE kici_events SET state = 'awaiting', run_id = :run_id
WHERE id = :event_id AND state = 'pending' AND claimed_by = :instance_id
RETURNING id;

-- name: release_event
-- Its holder is done with an event.
UPDATE kici_events SET claimed_until = NULL
WHERE id = :event_id AND claimed_by = :instance_id
RETURNING id;

-- name: process_event
-- An event is handled: its secrets go.
UPDATE kici_events SET
    state = 'processed', processed_at = COALESCE(:now, now_ms()), sealed = NULL, claimed_until = NULL, last_error = NULL
WHERE id = :event_id AND state IN ('pending', 'awaiting')
RETURNING id AS event_id;

-- name: delete_ended_provision
-- The scale-down of an event spawn is delivered to all of its targets: nothing is left of it.
DELETE FROM scaler_spawning_agents
WHERE agent_id = :agent_id AND backend_type = 'event' AND state = 'ending'
    AND NOT EXISTS (
        SELECT 1 FROM kici_events
        WHERE kici_events.emission_id = :emission_id AND kici_events.state <> 'processed'
    )
RETURNING agent_id;
DELETE FROM scaler_reservations WHERE agent_id = :agent_id;
DELETE FROM scaler_pending_claims WHERE agent_id = :agent_id;
UPDATE agent_tokens SET revoked_at = now_ms()
WHERE agent_id = :agent_id AND kind = 'ephemeral' AND revoked_at IS NULL;

-- name: retry_event
-- Deliver an event again, later.
UPDATE kici_events SET
    state = 'pending', due_at = COALESCE(:now, now_ms()) + :delay_ms, claimed_until = NULL, run_id = NULL,
    failed_runs = failed_runs + :failed_runs, last_error = :error
WHERE id = :event_id AND state IN ('pending', 'awaiting')
RETURNING id;

-- name: bury_event
-- Give an event up.
UPDATE kici_events SET
    state = 'dead', dead_at = COALESCE(:now, now_ms()), dead_reason = :dead_reason, claimed_until = NULL,
    failed_runs = failed_runs + 1, last_error = :error
WHERE id = :event_id AND state IN ('pending', 'awaiting')
RETURNING id;

-- name: awaited_events
-- Events whose run is over, or was never made by whoever wanted to.
SELECT kici_events.*, runs.status AS run_status
FROM kici_events INDEXED BY kici_events_awaiting
LEFT JOIN runs ON runs.id = kici_events.run_id
WHERE kici_events.state = 'awaiting'
    AND (
        runs.status NOT IN ('running', 'cancelling')
        OR (runs.id IS NULL AND (kici_events.claimed_until IS NULL OR kici_events.claimed_until <= COALESCE(:now, now_ms())))
    )
ORDER BY kici_events.seq
LIMIT :limit;

-- name: event
-- One event on its way to one target.
SELECT * FROM kici_events WHERE id = :event_id;

-- name: event_of_run
-- The event that a run was started for.
SELECT * FROM kici_events WHERE run_id = :run_id;

-- name: sealed_fields
-- The sealed fields of an event that is not handled yet.
SELECT sealed FROM kici_events WHERE emission_id = :emission_id AND sealed IS NOT NULL LIMIT 1;

-- name: events
-- Events, newest first.
SELECT * FROM kici_events
WHERE seq < COALESCE(:before_seq, 9223372036854775807)
    AND (:state IS NULL OR state = :state)
    AND (:name IS NULL OR name = :name)
ORDER BY seq DESC
LIMIT :limit;

-- name: dead_events
-- Events that were given up, newest first.
SELECT * FROM kici_events INDEXED BY kici_events_dead
WHERE state = 'dead' AND seq < COALESCE(:before_seq, 9223372036854775807)
ORDER BY seq DESC
LIMIT :limit;

-- name: count_dead_events
-- How many events were given up.
SELECT count(*) AS events FROM kici_events INDEXED BY kici_events_dead WHERE state = 'dead';

-- name: revive_event
-- Deliver a given-up event after all, unless it is too late.
UPDATE kici_events SET
    state = 'pending', due_at = COALESCE(:now, now_ms()), attempts = 0, run_id = NULL, dead_at = NULL,
    dead_reason = NULL
WHERE id = :event_id AND state = 'dead' AND dead_reason <> 'withdrawn'
    AND (expires_at IS NULL OR expires_at > COALESCE(:now, now_ms()))
RETURNING id;

-- name: discard_event
-- Forget a given-up event.
DELETE FROM kici_events WHERE id = :event_id AND state = 'dead' RETURNING id;

-- name: purge_events
-- Forget events that were handled long ago.
DELETE FROM kici_events
WHERE seq IN (
    SELECT seq FROM kici_events INDEXED BY kici_events_handled
    WHERE state IN ('processed', 'unmatched') AND created_at < :created_before
    LIMIT :limit
)
RETURNING id;

-- name: erase_expired_secrets
-- Secrets of given-up events that nobody can use any more.
UPDATE kici_events SET sealed = NULL
WHERE seq IN (
    SELECT seq FROM kici_events INDEXED BY kici_events_dead
    WHERE state = 'dead' AND sealed IS NOT NULL AND expires_at <= COALESCE(:now, now_ms())
)
RETURNING id;

-- name: put_registration
-- Say who gets which events.
INSERT INTO workflow_registrations (ref, kind, events, document, applied_by, updated_at)
VALUES (:ref, :kind, :events, :document, :applied_by, :updated_at)
ON CONFLICT (ref) DO UPDATE SET
    kind = excluded.kind,
    events = excluded.events,
    document = excluded.document,
    applied_by = excluded.applied_by,
    updated_at = excluded.updated_at;

-- name: registration
-- One registration.
SELECT * FROM workflow_registrations WHERE ref = :ref;

-- name: registrations
-- All registrations.
SELECT * FROM workflow_registrations ORDER BY ref LIMIT :limit;

-- name: delete_registration
-- Somebody gets events no longer.
DELETE FROM workflow_registrations WHERE ref = :ref RETURNING ref;
