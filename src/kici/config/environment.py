"""Settings of a coordinator: its environment and flags, read once, all problems told together.

Each field is the variable `KICI_<FIELD>`; flags win over variables, and an empty variable counts as unset.  Not
here: `scalers.yaml` (`kici.config.load`, which costs more to import), and settings that change while the
coordinator runs, which live in the database and take these as their defaults where names agree.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from kici.config.names import (
    AGENT_NAMES,
    CLI_NAMES,
    FORWARD_PREFIX,
    PREFIX,
    TEST_NAMES,
    WORKER_NAMES,
    is_free,
    why_unused,
)
from kici.config.nodes import shortened
from kici.config.problems import did_you_mean
from kici.config.variables import From, Like, Unfit, reader_of
from kici.domain.errors import Misconfigured


class AgentAuth(StrEnum):
    """How agents prove that they may register."""

    TOKEN = "token"
    NONE = "none"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class LogFormat(StrEnum):
    """`auto`: text on a terminal, JSON elsewhere."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


def _postgres_url(text: str) -> str:
    if not text.startswith(("postgres://", "postgresql://")):
        raise ValueError("leave it unset for the embedded database")
    return text


def _websocket_url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if scheme not in {"ws", "wss"} or not separator or not rest.split("/")[0]:
        raise ValueError("agents connect by WebSocket")
    return text


def _key(text: str) -> str:
    if len(text) != 64 or set(text.lower()) - set("0123456789abcdef"):
        raise ValueError("openssl rand -hex 32 makes one")
    return text


def _token(text: str) -> str:
    if not 32 <= len(text) <= 128 or not all(char.isascii() and (char.isalnum() or char in "-_") for char in text):
        raise ValueError("openssl rand -hex 32 makes one")
    return text


def _host(text: str) -> str:
    if any(char.isspace() or char in "/:" for char in text) and not _is_ipv6(text):
        raise ValueError("the port is set by KICI_PORT")
    return text


def _is_ipv6(text: str) -> bool:
    try:
        return ip_address(text).version == 6
    except ValueError:
        return False


Milliseconds = Annotated[int, From(0)]
AtLeastASecond = Annotated[int, From(1000)]
AdminToken = Annotated[str, Like("32 to 128 letters, digits, - and _", _token)]
SecretKey = Annotated[str, Like("64 hexadecimal digits", _key)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Everything that a coordinator is told at its start."""

    host: Annotated[str, Like("an address or a host name", _host)] = "127.0.0.1"
    """Address to listen on.  Loopback by default, so that nothing is reachable from elsewhere unasked."""
    port: Annotated[int, From(0, 65535)] = 4000
    """Port of HTTP and WebSocket.  0: any free one."""
    data_dir: Path
    """Folder of everything that this installation keeps.  Default: `$XDG_STATE_HOME/kici`, by the XDG rules."""
    database_url: Annotated[str, Like("a postgresql:// URL", _postgres_url)] | None = field(default=None, repr=False)
    """The PostgreSQL that coordinators share.  None: the embedded database in the data directory, one coordinator."""
    db_pool_max: Annotated[int, From(1)] = 20
    """Connections to PostgreSQL at most."""
    db_pool_acquire_timeout_ms: AtLeastASecond = 5000
    """Milliseconds that a query waits for a connection, and a cluster-wide cap for its lock."""
    db_statement_timeout_ms: Milliseconds = 30_000
    """Milliseconds after which PostgreSQL gives up a statement.  0: never."""
    orchestrator_url: Annotated[str, Like("a ws:// or wss:// URL", _websocket_url)] | None = None
    """Where spawned agents connect to.  None: `ws://127.0.0.1:<port>/ws`; a scaler's own setting wins."""
    cluster_address: Annotated[str, Like("a ws:// or wss:// URL", _websocket_url)] | None = None
    """Where agents of other coordinators can reach this one in a hand-over.  None: they are not told."""
    agent_auth: AgentAuth = AgentAuth.TOKEN
    """Whether agents need a token.  `none` is for experiments on loopback, and refused elsewhere."""
    agent_token_ttl_ms: AtLeastASecond = 3_600_000
    """Milliseconds in which the token of a spawned agent admits it for the first time."""
    agent_reconnect_grace_ms: Milliseconds = 60_000
    """Milliseconds that a busy spawned agent may be gone before its job fails.  0: none."""
    bootstrap_admin_token: AdminToken | None = field(default=None, repr=False)
    """The owner's token of a new installation.  None: one is made and written into the data directory."""
    secret_key: SecretKey | None = field(default=None, repr=False)
    """Key of stored secrets.  None (and no file): one is made and kept in the data directory."""
    secret_key_file: Path | None = None
    """File that holds the key of stored secrets."""
    secret_key_old: SecretKey | None = field(default=None, repr=False)
    """The key before, readable during a rotation."""
    secret_key_file_old: Path | None = None
    """File that holds the key before."""
    queue_max_depth: Annotated[int, From(1)] = 100_000
    """Waiting jobs at which new ones are refused."""
    queue_timeout_ms: Milliseconds = 3_600_000
    """Milliseconds that a job waits for an agent before it is given up.  0: for ever."""
    queue_backpressure_threshold: Annotated[int, From(0)] = 100
    """Waiting jobs at which a warning is logged.  0: never."""
    dispatch_ack_timeout_ms: AtLeastASecond = 10_000
    """Milliseconds in which an agent must acknowledge a job that it was offered."""
    unroutable_grace_ms: Milliseconds = 120_000
    """Milliseconds after which a job that nobody could ever serve fails.  0: it goes on waiting."""
    reroute_flap_grace_ms: AtLeastASecond = 120_000
    """Milliseconds that a coordinator may be silent before its machines are reclaimed."""
    cluster_leader_ttl_ms: AtLeastASecond = 3000
    """Milliseconds of a leader's term.  A leader that is killed is replaced within one and a half of them."""
    scaler_config_path: Path | None = None
    """The scalers file.  None (and no directory): one scaler of local processes."""
    scaler_config_dir: Path | None = None
    """Folder with further scaler files, `*.yaml` and `*.yml`.  None: none."""
    scaler_config_watch: bool = False
    """Reload when one of these files changes.  False: only when asked (SIGHUP, `kici-admin scaler reload`), so that
    a file that is being edited is not read half-way."""
    machine_ledger_dir: Path | None = None
    """Folder of the machine pools' ledgers, one for all orchestrators of a host.  None: the usual places are tried."""
    scaler_spawn_timeout_ms: AtLeastASecond = 300_000
    """Milliseconds in which a spawn must succeed; for event scalers, in which the machine must register."""
    scaler_pending_sweep_interval_ms: AtLeastASecond = 10_000
    """Milliseconds between two offers of all waiting jobs to the scalers."""
    scaler_reap_interval_ms: Annotated[int, From(5000)] = 60_000
    """Milliseconds between two passes of the reaper of event provisions."""
    scaler_reap_stranded_timeout_ms: Annotated[int, From(60_000)] = 1_800_000
    """Milliseconds that an agent must be gone from all coordinators before its machine is torn down."""
    scaler_reap_reattempt_interval_ms: Annotated[int, From(60_000)] = 600_000
    """Milliseconds before an undelivered teardown is tried again."""
    scaler_claim_retention_ms: Milliseconds = 3_600_000
    """Milliseconds for which expired claim codes are kept, so that a late machine is told why."""
    scaler_provision_backoff_base_ms: AtLeastASecond = 30_000
    """Milliseconds that a scaler pauses after a first failed provision; doubles with each further one."""
    scaler_provision_backoff_max_ms: AtLeastASecond = 900_000
    """Longest of these pauses, in milliseconds; not below the base."""
    scaler_provision_max_consecutive_failures: Annotated[int, From(1)] = 5
    """Failures in a row from which on refusals say that it keeps failing."""
    firecracker_api_socket_wait_ms: Annotated[int, From(100)] = 30_000
    """Milliseconds that a microVM's control socket may take to appear."""
    log_level: LogLevel = LogLevel.INFO
    """Least level that is logged."""
    log_format: LogFormat = LogFormat.AUTO
    """Shape of log lines."""
    dev: bool = False
    """Warn about unknown variables instead of refusing them."""
    agent_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What agents are given: every `KICI_AGENT_ENV_<NAME>`, as `<NAME>`."""
    notices: tuple[str, ...] = ()
    """What the reader of the environment wants to be logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """A variable or flag that cannot be accepted."""

    name: str
    found: str
    expected: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.name}: found {self.found}, expected {self.expected}{hint}"


class SettingsRefused(Misconfigured):
    """The environment or flags are wrong; all problems together."""

    def __init__(self, problems: tuple[SettingProblem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


NOT_VARIABLES: Final = frozenset({"agent_environment", "notices"})
SECRETS: Final = frozenset({"database_url", "bootstrap_admin_token", "secret_key", "secret_key_old"})


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """By the XDG rules; a relative `XDG_STATE_HOME` does not count, as they say."""
    state = environ.get("XDG_STATE_HOME", "")
    if state.startswith("/"):
        return Path(state) / "kici"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".local" / "state" / "kici"


def coordinator_names() -> frozenset[str]:
    """The variables of `CoordinatorSettings`."""
    return frozenset(_variable(name) for name in _rules())


def known_names() -> frozenset[str]:
    """Every variable that some program of ours reads."""
    return coordinator_names() | AGENT_NAMES | WORKER_NAMES | CLI_NAMES | TEST_NAMES


def read_settings(environ: Mapping[str, str], **flags: object) -> CoordinatorSettings:
    """Settings from variables and, by field name, flags (None: not given).  Raises `SettingsRefused`."""
    problems: list[SettingProblem] = []
    notices: list[str] = []
    values: dict[str, Any] = {}
    for name, read in _rules().items():
        given = _given(name, environ, flags.get(name))
        if given is None:
            continue
        source, text = given
        try:
            values[name] = read(text)
        except Unfit as unfit:
            found = "a value that I do not show" if name in SECRETS else f'"{shortened(text)}"'
            problems.append(SettingProblem(name=source, found=found, expected=unfit.expected, hint=unfit.hint))
    values.setdefault("data_dir", default_data_dir(environ))
    forwarded = {name.removeprefix(FORWARD_PREFIX): value for name, value in environ.items() if _is_forwarded(name)}
    settings = CoordinatorSettings(agent_environment=forwarded, **values)
    _judge_names(environ, is_lenient=settings.dev, problems=problems, notices=notices)
    for rule in CROSS_RULES:
        problems.extend(rule(settings))
    if problems:
        raise SettingsRefused(tuple(problems))
    return dataclasses.replace(settings, notices=tuple(notices))


def _given(name: str, environ: Mapping[str, str], flag: object) -> tuple[str, str] | None:
    if flag is not None:
        return f"--{name.replace('_', '-')}", str(flag)
    text = environ.get(_variable(name), "")
    return (_variable(name), text) if text else None


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _is_forwarded(name: str) -> bool:
    return name.startswith(FORWARD_PREFIX) and name != FORWARD_PREFIX


def _judge_names(
    environ: Mapping[str, str], *, is_lenient: bool, problems: list[SettingProblem], notices: list[str]
) -> None:
    known = known_names()
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or is_free(name):
            continue
        reason = why_unused(name)
        if reason is not None:
            notices.append(f"{shortened(name)} has no effect: {reason}")
            continue
        problem = SettingProblem(
            name=shortened(name),
            found="a variable that no program here knows",
            expected="a known name",
            hint=did_you_mean(name, known) or "KICI_DEV=true lets it pass",
        )
        if is_lenient:
            notices.append(str(problem))
        else:
            problems.append(problem)


@cache
def _rules() -> dict[str, Callable[[str], Any]]:
    hints = get_type_hints(CoordinatorSettings, include_extras=True)
    return {name: reader_of(hint) for name, hint in hints.items() if name not in NOT_VARIABLES}


# --- rules between values


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def agents_are_authenticated_beyond_loopback(settings: CoordinatorSettings) -> Iterator[SettingProblem]:
    if settings.agent_auth is AgentAuth.NONE and not is_loopback(settings.host):
        yield SettingProblem(
            name="KICI_AGENT_AUTH",
            found=f"none while the coordinator listens on {settings.host}",
            expected="token, or a loopback address in KICI_HOST",
            hint="anybody who reaches the port could register an agent and get jobs with their secrets",
        )


def backoff_maximum_is_not_below_its_base(settings: CoordinatorSettings) -> Iterator[SettingProblem]:
    base, most = settings.scaler_provision_backoff_base_ms, settings.scaler_provision_backoff_max_ms
    if most < base:
        yield SettingProblem(
            name="KICI_SCALER_PROVISION_BACKOFF_MAX_MS",
            found=str(most),
            expected=f"at least KICI_SCALER_PROVISION_BACKOFF_BASE_MS, which is {base}",
        )


def a_key_is_given_once(settings: CoordinatorSettings) -> Iterator[SettingProblem]:
    for key, file, name in (
        (settings.secret_key, settings.secret_key_file, "KICI_SECRET_KEY"),
        (settings.secret_key_old, settings.secret_key_file_old, "KICI_SECRET_KEY_OLD"),
    ):
        if key is not None and file is not None:
            yield SettingProblem(name=name, found="a key and a file with one", expected="one of the two")


CROSS_RULES: Final[tuple[Callable[[CoordinatorSettings], Iterator[SettingProblem]], ...]] = (
    agents_are_authenticated_beyond_loopback,
    backoff_maximum_is_not_below_its_base,
    a_key_is_given_once,
)
