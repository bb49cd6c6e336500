"""Names of environment variables: which our programs read, and which a reader of other documentation may expect.

A misspelt variable that is silently ignored costs an evening, so programs refuse `KICI_` names that nobody knows.
This module imports nothing, so that every program can afford it.
"""

from typing import Final

PREFIX: Final = "KICI_"
FORWARD_PREFIX: Final = "KICI_AGENT_ENV_"
"""`KICI_AGENT_ENV_<NAME>` at an orchestrator is `<NAME>` in its agents."""
FREE_PREFIXES: Final = (FORWARD_PREFIX, "KICI_TEST_")

AGENT_NAMES: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("ORCHESTRATOR_URL", "AGENT_ID", "AGENT_TOKEN", "SCALER_CLAIM_CODE", "LABELS", "ROLES", "PROPERTIES", "PORT"),
        *("SCALER_MANAGED", "SCALER_IDLE_TIMEOUT", "SCALER_PENDING_DISPATCH_TIMEOUT", "AGENT_ORPHAN_TIMEOUT_MS"),
        *("EXECUTION_MODE", "RUNTIME_IMAGE", "RUNTIME_NODE_SOURCE", "JOB_IMAGE_AGENT", "BACKPRESSURE_MODE"),
        *("DEFAULT_STEP_TIMEOUT_MS", "MAX_LOG_SIZE_BYTES", "JOB_HEARTBEAT_INTERVAL_MS", "CONCURRENCY_WAIT_TIMEOUT_MS"),
        *("SANDBOX", "SANDBOX_NETWORK", "SANDBOX_HARDENED", "SANDBOX_PIDS_LIMIT", "SANDBOX_MEMORY_BYTES"),
        *("SANDBOX_NANO_CPUS", "SANDBOX_NETWORK_ISOLATION", "SANDBOX_READONLY_ROOTFS", "SANDBOX_USER"),
        *("RUNNER_USER", "TRUSTED_ENV", "IN_PLACE", "ALLOW_INSTALL_SCRIPTS", "HOST_INSTALL_REGISTRIES"),
        "AGENT_TOKEN_FILE",
        *("RUNNER_DEBUG_STDIO", "DOCKER_KEEP_FAILED", "AGENT_BETWEEN_JOBS_RESET_COMMAND", "AGENT_ORPHAN_CLEANUP"),
        *("AGENT_BETWEEN_JOBS_RESET_TIMEOUT_MS", "AGENT_BETWEEN_JOBS_RESET_RUN_ON", "AGENT_DRAIN_ON_RESET_FAILURE"),
        "DEV",
    )
)
WORKER_NAMES: Final = frozenset(
    {"KICI_CLUSTER_COORDINATOR_URL", "KICI_CLUSTER_COORDINATOR_URLS", "KICI_CLUSTER_JOIN_TOKEN"}
)
CLI_NAMES: Final = frozenset({"KICI_URL", "KICI_TOKEN", "KICI_ADMIN_URL", "KICI_ADMIN_TOKEN", "KICI_DATA_DIR"})
"""`KICI_ADMIN_URL` and `KICI_ADMIN_TOKEN` mean the same as `KICI_URL` and `KICI_TOKEN`."""
TEST_NAMES: Final = frozenset({"KICI_CASES"})

_PEERS: Final = "coordinators find each other in their database"
_ELECTION: Final = "a lease in the database elects the leader"
_REROUTE: Final = "jobs are not rerouted, every coordinator takes its own from the shared queue"
_LOG_FILES: Final = "logs go to the standard error output; the service manager keeps them"
_NO_PLATFORM: Final = "there is no platform service to connect to"
_ALIKE: Final = "all coordinators of a cluster count each other's signs of life alike"
_NOT_HERE: Final = "there is nothing here that it would set"

UNUSED_NAMES: Final[dict[str, str]] = {
    f"{PREFIX}{name}": why
    for why, names in {
        _PEERS: (
            *("CLUSTER_PEERS", "CLUSTER_PEER_DISCOVERY", "CLUSTER_NAME", "CLUSTER_CREDENTIAL_FILE"),
            *("CLUSTER_PEER_HEARTBEAT_INTERVAL_MS", "CLUSTER_PEER_MAX_RECONNECT_DELAY_MS", "CLUSTER_TRUSTED_PROXIES"),
            "OWNERSHIP_DB_CHECK_TIMEOUT_MS",
        ),
        _ELECTION: (
            *("CLUSTER_RAFT_ELECTION_TIMEOUT_MIN_MS", "CLUSTER_RAFT_ELECTION_TIMEOUT_MAX_MS"),
            *("CLUSTER_RAFT_HEARTBEAT_MS", "CLUSTER_ELECTION_GRACE_PERIOD_MS", "CLUSTER_SINGLE_NODE"),
        ),
        _ALIKE: ("CLUSTER_INSTANCE_HEARTBEAT_MS", "CLUSTER_PEER_STALE_TIMEOUT_MS"),
        "coordinators tell each other at once of a changed setting": ("CLUSTER_SETTINGS_CACHE_TTL_MS",),
        "the schema is brought up to date at every start": ("AUTO_MIGRATE",),
        "agents choose their pauses between attempts to connect": ("AGENT_MAX_RECONNECT_DELAY_MS",),
        "the live setting run_retention_days says how long ended jobs are kept": ("DISPATCH_QUEUE_TTL_DAYS",),
        _REROUTE: ("REROUTE_SPAWN_WINDOW_MS", "REROUTE_ACK_TIMEOUT_MS", "REROUTE_MAX_HOPS"),
        "the id is made once and kept in the data directory": ("CLUSTER_INSTANCE_ID", "INSTANCE_ID"),
        "kici up runs a coordinator and kici worker a worker": ("CLUSTER_ROLE", "MODE", "INSTANCE_MODE"),
        _NO_PLATFORM: ("PLATFORM_URL", "PLATFORM_TOKEN", "WEBHOOK_PUBLIC_URL", "WORKER_CONCURRENCY"),
        _LOG_FILES: ("LOG_DIR", "LOG_RETENTION_DAYS", "LOG_MAX_SIZE"),
        "flags, this environment and scalers.yaml configure everything": ("CONFIG", "SERVER_PORT", "BASE_PATH"),
        _NOT_HERE: (
            *("MAX_FANOUT_HOSTS", "SEALED_SECRETS_RETRY_BACKOFF_MS"),
            *("ROSTER_GRACE_MS", "ROSTER_TTL_MS", "HOST_REBOOT_DEADLINE_MS", "ORCHESTRATOR_HOST_AGENT_ID"),
            *("STALE_DETECTOR_SCAN_INTERVAL_MS", "STALE_DETECTOR_THRESHOLD_MULTIPLIER", "AGENT_BINARY_SOURCE"),
        ),
    }.items()
    for name in names
}
"""Documented for the system that this one follows, without effect here; the reason is for people."""
UNUSED_PREFIXES: Final = ("KICI_STORAGE_", "KICI_COLD_STORE_", "KICI_HETZNER_")


def is_free(name: str) -> bool:
    """Whether the name is somebody's own choice."""
    return name.startswith(FREE_PREFIXES)


def why_unused(name: str) -> str | None:
    """The reason why a documented name does nothing here; None: it does something, or nobody knows it."""
    if name.startswith(UNUSED_PREFIXES):
        return _NOT_HERE
    return UNUSED_NAMES.get(name)
