"""Settings: variables, flags, floors, names that nobody knows, and rules between values."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from kici.agent import environment as agent
from kici.config import names
from kici.config.docstrings import field_docs
from kici.config.environment import (
    NOT_VARIABLES,
    SECRETS,
    AgentAuth,
    CoordinatorSettings,
    LogLevel,
    SettingsRefused,
    coordinator_names,
    default_data_dir,
    is_loopback,
    known_names,
    read_settings,
)

HOME = {"HOME": "/home/ci"}
KEY = "0123456789abcdef" * 4


def settings(**variables: str) -> CoordinatorSettings:
    return read_settings(HOME | variables)


def refusals(flag: tuple[str, object] | None = None, /, **variables: str) -> list[str]:
    with pytest.raises(SettingsRefused) as refused:
        read_settings(HOME | variables, **dict([flag] if flag else []))
    assert str(refused.value).splitlines() == [str(problem) for problem in refused.value.problems]
    return [str(problem) for problem in refused.value.problems]


def refusal(**variables: str) -> str:
    found = refusals(**variables)
    assert len(found) == 1, found
    return found[0]


def test_nothing_given_means_the_embedded_coordinator_of_this_machine() -> None:
    bare = settings()
    assert (bare.host, bare.port, bare.database_url) == ("127.0.0.1", 4000, None)
    assert bare.data_dir == Path("/home/ci/.local/state/kici")
    assert bare.agent_auth is AgentAuth.TOKEN
    assert bare.orchestrator_url is None
    assert (bare.queue_max_depth, bare.queue_timeout_ms, bare.unroutable_grace_ms) == (100_000, 3_600_000, 120_000)
    assert (bare.agent_token_ttl_ms, bare.dispatch_ack_timeout_ms) == (3_600_000, 10_000)
    assert bare.scaler_config_path is None
    assert bare.notices == ()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("scaler_spawn_timeout_ms", 300_000),
        ("scaler_pending_sweep_interval_ms", 10_000),
        ("scaler_reap_interval_ms", 60_000),
        ("scaler_reap_stranded_timeout_ms", 1_800_000),
        ("scaler_reap_reattempt_interval_ms", 600_000),
        ("scaler_claim_retention_ms", 3_600_000),
        ("scaler_provision_backoff_base_ms", 30_000),
        ("scaler_provision_backoff_max_ms", 900_000),
        ("scaler_provision_max_consecutive_failures", 5),
        ("firecracker_api_socket_wait_ms", 30_000),
        ("agent_reconnect_grace_ms", 60_000),
        ("db_pool_acquire_timeout_ms", 5000),
    ],
)
def test_defaults_are_the_documented_ones(name: str, default: int) -> None:
    assert getattr(settings(), name) == default


def test_the_data_directory_follows_the_xdg_rules() -> None:
    assert default_data_dir({"XDG_STATE_HOME": "/var/state", "HOME": "/root"}) == Path("/var/state/kici")
    assert default_data_dir({"XDG_STATE_HOME": "relative", "HOME": "/root"}) == Path("/root/.local/state/kici")
    assert default_data_dir({}).parts[-3:] == (".local", "state", "kici")


def test_variables_are_read_and_flags_win_over_them() -> None:
    environ = HOME | {"KICI_PORT": "5000", "KICI_HOST": "::1", "KICI_LOG_LEVEL": "WARN"}
    read = read_settings(environ, port=0, data_dir=Path("/srv/kici"), host=None, dev=True)
    assert (read.port, read.host, read.dev) == (0, "::1", True)
    assert read.data_dir == Path("/srv/kici")
    assert read.log_level is LogLevel.WARN


def test_an_empty_variable_is_unset() -> None:
    assert settings(KICI_PORT="", KICI_DATABASE_URL="").port == 4000


def test_all_problems_are_told_together() -> None:
    found = refusals(
        ("db_pool_max", 0),
        KICI_PORT="70000",
        KICI_QUEUE_MAX_DEPHT="5",
        KICI_SCALER_REAP_INTERVAL_MS="4999",
        KICI_AGENT_AUTH="tokn",
        KICI_DATABASE_URL="mysql://x",
    )
    assert [line.split(": ")[0] for line in found] == [
        "KICI_PORT",
        "KICI_DATABASE_URL",
        "--db-pool-max",
        "KICI_AGENT_AUTH",
        "KICI_SCALER_REAP_INTERVAL_MS",
        "KICI_QUEUE_MAX_DEPHT",
    ]
    assert "did you mean token?" in found[3]
    assert "did you mean KICI_QUEUE_MAX_DEPTH?" in found[5]


@pytest.mark.parametrize(
    ("name", "low"),
    [
        ("KICI_SCALER_SPAWN_TIMEOUT_MS", 999),
        ("KICI_SCALER_PENDING_SWEEP_INTERVAL_MS", 999),
        ("KICI_SCALER_REAP_INTERVAL_MS", 4999),
        ("KICI_SCALER_REAP_STRANDED_TIMEOUT_MS", 59_999),
        ("KICI_SCALER_REAP_REATTEMPT_INTERVAL_MS", 59_999),
        ("KICI_SCALER_PROVISION_BACKOFF_BASE_MS", 999),
        ("KICI_SCALER_PROVISION_MAX_CONSECUTIVE_FAILURES", 0),
        ("KICI_DISPATCH_ACK_TIMEOUT_MS", 999),
        ("KICI_REROUTE_FLAP_GRACE_MS", 999),
        ("KICI_QUEUE_MAX_DEPTH", 0),
        ("KICI_AGENT_TOKEN_TTL_MS", 999),
    ],
)
def test_each_floor_holds_and_is_itself_allowed(name: str, low: int) -> None:
    assert name in refusal(**{name: str(low)})
    assert getattr(settings(**{name: str(low + 1)}), name.removeprefix("KICI_").lower()) == low + 1


@pytest.mark.parametrize(
    "name",
    [
        "KICI_QUEUE_TIMEOUT_MS",
        "KICI_UNROUTABLE_GRACE_MS",
        "KICI_SCALER_CLAIM_RETENTION_MS",
        "KICI_AGENT_RECONNECT_GRACE_MS",
    ],
)
def test_zero_is_a_value_where_it_means_never_or_none(name: str) -> None:
    assert getattr(settings(**{name: "0"}), name.removeprefix("KICI_").lower()) == 0


@pytest.mark.parametrize("text", ["-1", "1.5", "1e3", "many", "١", "9" * 30, "0x10"])
def test_a_number_is_plain_digits(text: str) -> None:
    assert "expected a whole number" in refusal(KICI_QUEUE_MAX_DEPTH=text)


@pytest.mark.parametrize(("text", "meant"), [("true", True), ("1", True), ("FALSE", False), ("0", False)])
def test_a_flag_is_true_or_false(text: str, meant: bool) -> None:
    assert settings(KICI_DEV=text).dev is meant
    assert "true or false" in refusal(KICI_DEV="maybe")


def test_a_backoff_maximum_below_its_base_is_refused() -> None:
    assert "KICI_SCALER_PROVISION_BACKOFF_MAX_MS: found 20000" in refusal(KICI_SCALER_PROVISION_BACKOFF_MAX_MS="20000")
    assert settings(KICI_SCALER_PROVISION_BACKOFF_BASE_MS="900000").scaler_provision_backoff_base_ms == 900_000


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "ci.example"])
def test_agents_without_tokens_stay_on_this_machine(host: str) -> None:
    assert "KICI_AGENT_AUTH: found none while" in refusal(KICI_HOST=host, KICI_AGENT_AUTH="none")
    assert settings(KICI_HOST=host).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)
    assert settings(KICI_HOST=host, KICI_AGENT_AUTH="none").agent_auth is AgentAuth.NONE


@pytest.mark.parametrize("host", ["127.0.0.1:4000", "http://x", "a b"])
def test_a_host_is_no_url(host: str) -> None:
    assert "KICI_HOST: found" in refusal(KICI_HOST=host)


def test_a_key_is_given_once_and_is_64_digits() -> None:
    assert settings(KICI_SECRET_KEY=KEY).secret_key == KEY
    assert "one of the two" in refusal(KICI_SECRET_KEY=KEY, KICI_SECRET_KEY_FILE="/k")
    assert "64 hexadecimal digits" in refusal(KICI_SECRET_KEY_OLD="abc")


def test_secrets_are_shown_neither_in_problems_nor_in_a_repr() -> None:
    secret = "postgres://u:hunter2@h/d"
    assert "hunter2" not in repr(settings(KICI_DATABASE_URL=secret, KICI_AGENT_ENV_TOKEN="hunter2"))
    assert "hunter2" not in refusal(KICI_DATABASE_URL="mysql://u:hunter2@h/d")
    assert "hunter2" not in refusal(KICI_SECRET_KEY="hunter2")
    hidden = {field.name for field in dataclasses.fields(CoordinatorSettings) if not field.repr}
    assert hidden == SECRETS | {"agent_environment"}


@pytest.mark.parametrize("url", ["http://x/ws", "ws:///ws", "x:4000"])
def test_agents_are_given_a_websocket_url(url: str) -> None:
    assert "KICI_ORCHESTRATOR_URL: found" in refusal(KICI_ORCHESTRATOR_URL=url)
    assert settings(KICI_ORCHESTRATOR_URL="wss://ci.example/ws").orchestrator_url == "wss://ci.example/ws"


def test_paths_know_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ci")
    assert settings(KICI_SCALER_CONFIG_PATH="~/scalers.yaml").scaler_config_path == Path("/home/ci/scalers.yaml")
    assert "expected a path" in refusal(KICI_SCALER_CONFIG_PATH="~nobody-of-that-name/x")


# --- names


def test_an_unknown_name_is_refused_with_the_near_one() -> None:
    assert "did you mean KICI_LABELS?" in refusal(KICI_LABLES="x")
    assert "KICI_DEV=true lets it pass" in refusal(KICI_ZZZZZZZZZZZZ="x")


def test_development_lets_unknown_names_pass_with_a_notice() -> None:
    (notice,) = settings(KICI_LABLES="x", KICI_DEV="true").notices
    assert "KICI_LABLES" in notice


@pytest.mark.parametrize("name", sorted(known_names() - coordinator_names()))
def test_names_of_other_programs_are_known(name: str) -> None:
    assert settings(**{name: "x"}).notices == ()


@pytest.mark.parametrize("name", ["KICI_AGENT_ENV_ANYTHING", "KICI_TEST_ANYTHING", "PATH", "kici_port"])
def test_free_names_are_nobodys_business(name: str) -> None:
    assert settings(**{name: "x"}).notices == ()


@pytest.mark.parametrize("name", [*sorted(names.UNUSED_NAMES), "KICI_STORAGE_BUCKET"])
def test_documented_names_without_effect_only_warn(name: str) -> None:
    (notice,) = settings(**{name: "x"}).notices
    assert notice.startswith(f"{name} has no effect: ")


def test_no_name_is_both_used_and_unused() -> None:
    assert known_names() & names.UNUSED_NAMES.keys() == set()


def test_the_agents_own_list_is_the_one_that_coordinators_know() -> None:
    assert agent.OURS | agent.WITHOUT_EFFECT | {"KICI_SANDBOX"} == names.AGENT_NAMES


def test_forwarded_variables_lose_their_prefix() -> None:
    read = settings(KICI_AGENT_ENV_HTTP_PROXY="http://p", KICI_AGENT_ENV_KICI_TRUSTED_ENV="true", KICI_AGENT_ENV_="x")
    assert dict(read.agent_environment) == {"HTTP_PROXY": "http://p", "KICI_TRUSTED_ENV": "true"}


def test_every_setting_is_documented() -> None:
    docs = field_docs(CoordinatorSettings)
    missing = [name for name in get_type_hints(CoordinatorSettings) if name not in docs]
    assert missing == []


def test_every_setting_is_a_variable() -> None:
    fields = {field.name for field in dataclasses.fields(CoordinatorSettings)} - NOT_VARIABLES
    assert coordinator_names() == {f"KICI_{name.upper()}" for name in fields}


@pytest.mark.parametrize("text", ["short", "x" * 129, "with a space in it, and long enough", "ä" * 32])
def test_the_first_token_is_hard_to_guess_and_fits_a_header(text: str) -> None:
    assert "32 to 128 letters" in refusal(KICI_BOOTSTRAP_ADMIN_TOKEN=text)
    assert settings(KICI_BOOTSTRAP_ADMIN_TOKEN="a" * 64).bootstrap_admin_token == "a" * 64
