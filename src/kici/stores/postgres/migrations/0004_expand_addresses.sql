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
