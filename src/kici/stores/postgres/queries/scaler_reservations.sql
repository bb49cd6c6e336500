-- name: reservations
-- Reservations of an owner, oldest first.
SELECT * FROM scaler_reservations
WHERE owner_instance_id = :owner
ORDER BY reserved_at, agent_id
LIMIT :limit;

-- name: delete_reservation
-- Give up a reservation.
DELETE FROM scaler_reservations WHERE agent_id = :agent_id RETURNING agent_id;
