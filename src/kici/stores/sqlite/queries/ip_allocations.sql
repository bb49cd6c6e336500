-- name: insert_address
-- Give an address to a microVM, unless somebody has it or it has one.
INSERT INTO ip_allocations (ip, vm_id, scaler_name, owner_instance_id, tap_device, mac_address, allocated_at)
VALUES (:ip, :vm_id, :scaler_name, :owner, :tap_device, :mac_address, COALESCE(:now, now_ms()))
ON CONFLICT DO NOTHING
RETURNING ip;

-- name: delete_address
-- Take back the address of a microVM.
DELETE FROM ip_allocations WHERE vm_id = :vm_id RETURNING ip;

-- name: addresses
-- Addresses of microVMs, everybody's.
SELECT * FROM ip_allocations ORDER BY ip LIMIT :limit;
