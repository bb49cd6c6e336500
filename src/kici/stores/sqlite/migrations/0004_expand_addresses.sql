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
