"""Named SQL: which queries there are, and how a dialect's files become statements.

All SQL lies in `stores/<dialect>/queries/*.sql`.  A query opens with `-- name: claim_job` and a line that says what
it is for; its parameters are written `:name` in every dialect.  A query may be several statements in a dialect that
needs them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final


class Query(StrEnum):
    """Every query, in alphabetical order."""

    ACCESS_LOG = "access_log"
    ACQUIRE_LEASE = "acquire_lease"
    ADDRESSES = "addresses"
    AGENT_TOKEN = "agent_token"
    AGENT_TOKENS = "agent_tokens"
    ANSWER_PEER = "answer_peer"
    API_TOKEN = "api_token"
    API_TOKENS = "api_tokens"
    APPEND_LOG = "append_log"
    ASK_PEER = "ask_peer"
    AWAIT_EVENT = "await_event"
    AWAITED_EVENTS = "awaited_events"
    BEAT = "beat"
    BUMP_SETTINGS = "bump_settings"
    BURY_EVENT = "bury_event"
    CANCEL_JOBS = "cancel_jobs"
    CANCEL_RUN = "cancel_run"
    CANCEL_STARTED_JOB = "cancel_started_job"
    CAPACITIES = "capacities"
    CLAIM_BOUND = "claim_bound"
    CLAIM_EVENTS = "claim_events"
    CLAIM_JOB = "claim_job"
    CLAIM_OLDEST = "claim_oldest"
    CLEAR_CLUSTER_SETTINGS = "clear_cluster_settings"
    CLEAR_DEFERRAL_OF = "clear_deferral_of"
    CLEAR_ORG_SETTINGS = "clear_org_settings"
    CLEAR_UNROUTABLE = "clear_unroutable"
    CLOSE_RUN = "close_run"
    CLUSTER_SETTINGS = "cluster_settings"
    CONDEMN_PROVISION = "condemn_provision"
    CONNECTIONS_OF = "connections_of"
    COUNT_DEAD_EVENTS = "count_dead_events"
    COUNT_FAILURE = "count_failure"
    COUNTS_BY_STATUS = "counts_by_status"
    CREATE_AGENT_TOKEN = "create_agent_token"
    CREATE_API_TOKEN = "create_api_token"
    CREATE_JOIN_TOKEN = "create_join_token"
    DATABASE_NOW = "database_now"
    DEAD_EVENTS = "dead_events"
    DEFER_SCALER = "defer_scaler"
    DEFERRALS = "deferrals"
    DELETE_ADDRESS = "delete_address"
    DELETE_ENDED_PROVISION = "delete_ended_provision"
    DELETE_REGISTRATION = "delete_registration"
    DELETE_RESERVATION = "delete_reservation"
    DELETE_SECRET = "delete_secret"
    DELETE_SESSIONS_OF = "delete_sessions_of"
    DELETE_SPAWN = "delete_spawn"
    DESCRIBE_CLAIM = "describe_claim"
    DISCARD_EVENT = "discard_event"
    EMIT_EVENT = "emit_event"
    EMIT_SCALE_UP = "emit_scale_up"
    END_BOUND_SPAWN = "end_bound_spawn"
    END_JOB = "end_job"
    END_PROVISION = "end_provision"
    END_SPAWN = "end_spawn"
    ENDED_JOBS = "ended_jobs"
    ERASE_EXPIRED_SECRETS = "erase_expired_secrets"
    EVENT = "event"
    EVENT_OF_RUN = "event_of_run"
    EVENTS = "events"
    EXPIRED_JOBS = "expired_jobs"
    FINISH_LONE_JOB = "finish_lone_job"
    FORGET_ADDRESSES_OF = "forget_addresses_of"
    FORGET_CAPACITY_OF = "forget_capacity_of"
    FORGET_COUNTED = "forget_counted"
    FORGET_INSTANCE = "forget_instance"
    FORGET_LINKS_OF = "forget_links_of"
    FORGET_RESERVATIONS_OF = "forget_reservations_of"
    FORGET_SPAWNS_OF = "forget_spawns_of"
    GIVE_TOKEN = "give_token"
    HAS_ADOPTED_PROVISIONS = "has_adopted_provisions"
    HELD_JOBS = "held_jobs"
    INSERT_ADDRESS = "insert_address"
    INSERT_CLUSTER_SPAWN = "insert_cluster_spawn"
    INSERT_SPAWN = "insert_spawn"
    INSTANCES = "instances"
    INVALIDATE_CLAIMS = "invalidate_claims"
    JOB = "job"
    JOBS_BY_STATUS = "jobs_by_status"
    JOBS_LISTED = "jobs_listed"
    JOBS_OF_RUN = "jobs_of_run"
    JOBS_OWNED_BY = "jobs_owned_by"
    JOIN_TOKENS = "join_tokens"
    LEASE = "lease"
    LIMIT_LOCK_WAIT = "limit_lock_wait"
    LINK_WORKERS = "link_workers"
    LOCK_LOGS = "lock_logs"
    LOCK_RUN_OF_JOB = "lock_run_of_job"
    LOCK_SETTINGS = "lock_settings"
    LOCK_WORKER = "lock_worker"
    LOG_ENDS = "log_ends"
    MARK_UNROUTABLE = "mark_unroutable"
    META = "meta"
    MIGRATIONS_APPLIED = "migrations_applied"
    OFFER_AGAIN = "offer_again"
    OLDEST_JOBS = "oldest_jobs"
    ORG_SETTINGS = "org_settings"
    OVERDUE_ACKS = "overdue_acks"
    OVERDUE_RECOVERIES = "overdue_recoveries"
    PATCH_CLUSTER_SETTINGS = "patch_cluster_settings"
    PATCH_ORG_SETTINGS = "patch_org_settings"
    PEER_ANSWER = "peer_answer"
    PEER_REQUESTS = "peer_requests"
    PING = "ping"
    PROCESS_EVENT = "process_event"
    PROVISION_ADOPTER = "provision_adopter"
    PROVISION_NEWS = "provision_news"
    PRUNE_ACCESS_LOG = "prune_access_log"
    PRUNE_CLASSES = "prune_classes"
    PRUNE_JOBS = "prune_jobs"
    PURGE_AGENT_TOKENS = "purge_agent_tokens"
    PURGE_CLAIMS = "purge_claims"
    PURGE_EVENTS = "purge_events"
    PURGE_JOIN_TOKENS = "purge_join_tokens"
    PURGE_OUTCOMES = "purge_outcomes"
    PURGE_PEER_REQUESTS = "purge_peer_requests"
    PUT_CAPACITY = "put_capacity"
    PUT_REGISTRATION = "put_registration"
    PUT_SECRET = "put_secret"
    PUT_SESSION = "put_session"
    PUT_WORKER = "put_worker"
    QUEUED_COUNT = "queued_count"
    QUEUED_OF_CLASS = "queued_of_class"
    READ_LOG = "read_log"
    REAP_CANDIDATES = "reap_candidates"
    RECORD_ACCESS = "record_access"
    RECORD_ADOPTION = "record_adoption"
    RECORD_CONDEMNED = "record_condemned"
    RECORD_MIGRATION = "record_migration"
    RECOVER_JOB = "recover_job"
    REDEEM_CLAIM = "redeem_claim"
    REGISTER_CLAIM = "register_claim"
    REGISTER_SPAWN = "register_spawn"
    REGISTRATION = "registration"
    REGISTRATIONS = "registrations"
    RELEASE_AGENT = "release_agent"
    RELEASE_DEPENDENTS = "release_dependents"
    RELEASE_EVENT = "release_event"
    RELEASE_LEASE = "release_lease"
    REMOVE_INSTANCE = "remove_instance"
    REQUEUE_JOB = "requeue_job"
    RESEAL_SECRET = "reseal_secret"
    RESERVATIONS = "reservations"
    RESUME_JOB = "resume_job"
    RETRY_EVENT = "retry_event"
    REVIVE_EVENT = "revive_event"
    REVOKE_AGENT_TOKEN = "revoke_agent_token"
    REVOKE_API_TOKEN = "revoke_api_token"
    REVOKE_JOIN_TOKEN = "revoke_join_token"
    REVOKE_WORKER = "revoke_worker"
    REVOKED_SESSION_TOKENS = "revoked_session_tokens"
    RUN = "run"
    RUN_OF_KEY = "run_of_key"
    RUNS_LISTED = "runs_listed"
    SCALE_UP_RUNS = "scale_up_runs"
    SEALED_FIELDS = "sealed_fields"
    SECRET = "secret"
    SECRETS = "secrets"
    SECRETS_OF_ALL = "secrets_of_all"
    SESSION = "session"
    SESSIONS = "sessions"
    SET_META = "set_meta"
    SET_PROVISIONING_ERROR = "set_provisioning_error"
    SKIP_DEPENDENTS = "skip_dependents"
    SLOT_STATE = "slot_state"
    SPAWN = "spawn"
    SPAWN_FOR_JOB = "spawn_for_job"
    SPAWNS = "spawns"
    START_JOB = "start_job"
    STRAYS = "strays"
    SUBMIT_RUN = "submit_run"
    TAKE_LOCK = "take_lock"
    TAKE_OVER_WORKER_RESERVATIONS = "take_over_worker_reservations"
    TAKE_OVER_WORKER_SPAWNS = "take_over_worker_spawns"
    UNLINK_WORKER = "unlink_worker"
    UNROUTABLE_JOBS = "unroutable_jobs"
    USE_JOIN_TOKEN = "use_join_token"
    VOID_JOIN_TOKENS = "void_join_tokens"
    WAITING_CLASSES = "waiting_classes"
    WITHDRAW_SCALE_UPS = "withdraw_scale_ups"
    WORKER = "worker"
    WORKER_LINKS = "worker_links"
    WORKERS = "workers"


_HEADER: Final = re.compile(r"^-- name: (\w+)\n-- (.+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"[ \t]*--[^\n]*")
_STATEMENT_END: Final = re.compile(r";\s*(?:\n|\Z)")
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sql:
    """The text of one query."""

    purpose: str
    statements: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters, in order of first use."""
        return tuple(dict.fromkeys(name for text in self.statements for name in _PARAMETER.findall(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """One statement with `$1`-style parameters, and the names that they stand for."""

    text: str
    parameters: tuple[str, ...]

    @property
    def answers_nothing(self) -> bool:
        """Whether it can have no rows."""
        return self.text.startswith(("INSERT", "UPDATE", "DELETE")) and "RETURNING" not in self.text


def parse(text: str) -> dict[str, Sql]:
    """Queries of one file by name.  Raises `ValueError` for a name that comes twice."""
    found: dict[str, Sql] = {}
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    for header, end in zip(headers, ends, strict=True):
        if header[1] in found:
            raise ValueError(f"query {header[1]} is defined twice")
        found[header[1]] = Sql(purpose=header[2], statements=split_statements(text[header.end() : end]))
    return found


def split_statements(text: str) -> tuple[str, ...]:
    """Statements of a script, without comments.  A statement ends with a semicolon at the end of a line."""
    parts = (part.strip() for part in _STATEMENT_END.split(_COMMENT.sub("", text)))
    return tuple(part for part in parts if part)


def load(folder: Path) -> dict[Query, Sql]:
    """Queries of a dialect.  Raises `ValueError` when the files and the enum do not agree."""
    found: dict[str, Sql] = {}
    for path in sorted(folder.glob("*.sql")):
        for name, sql in parse(path.read_text(encoding="utf-8")).items():
            if name in found:
                raise ValueError(f"query {name} of {path} is defined twice")
            found[name] = sql
    _check_names(folder, found)
    return {Query(name): sql for name, sql in found.items()}


def numbered(sql: Sql) -> Numbered:
    """The single statement of a query for a driver that numbers its parameters; `::casts` are left alone."""
    (text,) = sql.statements
    names = sql.parameters
    places = {name: place for place, name in enumerate(names, start=1)}
    return Numbered(text=_PARAMETER.sub(lambda match: f"${places[match[1]]}", text), parameters=names)


def _check_names(folder: Path, found: Iterable[str]) -> None:
    missing, unknown = set(Query) - set(found), set(found) - set(Query)
    if missing or unknown:
        raise ValueError(f"{folder} lacks queries {sorted(missing)} and has unknown ones {sorted(unknown)}")
