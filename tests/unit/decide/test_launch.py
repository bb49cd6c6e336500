"""How an agent process is started on each kind of host: the exact command line, environment and group."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.launch import (
    CgroupPlan,
    CgroupSetting,
    CgroupSupport,
    Launch,
    LaunchHost,
    LaunchOrder,
    LimitsBy,
    ProcessSet,
    Refusal,
    Systemd,
    TreeKill,
    batch_refusal,
    limits_plan,
    plan_launch,
    systemd_of,
    tree_kill_argv,
    tree_kill_outcome,
)
from kici.domain.resources import NOTHING, Amount

GIB = 1024**3
ID = "scaler-bare-metal-0123abcd"
LINUX = LaunchHost(
    system="linux",
    environment={"PATH": "/usr/bin", "HOME": "/home/ci", "XDG_RUNTIME_DIR": "/run/user/7"},
    python="/opt/kici/bin/python",
    program_folder="/opt/kici/bin",
)
SYSTEMD = replace(LINUX, systemd=Systemd.USER)
MACOS = replace(SYSTEMD, system="darwin")
WINDOWS = LaunchHost(
    system="win32",
    environment={"Path": r"C:\bin", "ComSpec": r"D:\Win\cmd.exe", "SystemRoot": r"D:\Win", "SECRET": "x"},
    python=r"C:\kici\python.exe",
    program_folder=r"C:\kici\Scripts",
)
V1 = CgroupSupport(tracking=True, limits=LimitsBy.V1)
V2 = CgroupSupport(tracking=True, limits=LimitsBy.V2)


def a_set(binary_path: str | None = "/opt/agent", **fields: Any) -> ProcessSet:
    return ProcessSet(labels=("linux", "gpu"), binary_path=binary_path, **fields)


def an_order(**fields: Any) -> LaunchOrder:
    order = LaunchOrder(
        agent_id=ID,
        labels=("linux", "gpu", "kici:scaler:local"),
        url="ws://127.0.0.1:4000/ws",
        token="sesame",
        limits=NOTHING,
        enforce_cgroups=False,
        mark="MARK=/data/agents/x",
    )
    return replace(order, **fields)


def launched(host: LaunchHost, chosen: ProcessSet, order: LaunchOrder) -> Launch:
    launch = plan_launch(host, chosen, order)
    assert isinstance(launch, Launch), launch
    return launch


def refused(host: LaunchHost, chosen: ProcessSet, order: LaunchOrder) -> str:
    launch = plan_launch(host, chosen, order)
    assert isinstance(launch, Refusal), launch
    return launch.reason


# --- command line


def test_a_path_is_started_as_it_is() -> None:
    launch = launched(LINUX, a_set("/opt/my agent"), an_order())
    assert launch.argv == ("/opt/my agent",)
    assert (launch.group, launch.unit, launch.is_own_agent) == (None, None, False)


def test_a_name_without_a_slash_is_this_installations() -> None:
    launch = launched(LINUX, a_set("kici-agent"), an_order())
    assert launch.argv == ("/opt/kici/bin/python", "-P", "-X", "MARK=/data/agents/x", "-m", "kici.apps.agent")
    assert launch.is_own_agent
    assert launched(LINUX, a_set("other"), an_order()).argv == ("/opt/kici/bin/other",)
    assert launched(WINDOWS, a_set("other.exe"), an_order()).argv == (r"C:\kici\Scripts\other.exe",)
    assert launched(WINDOWS, a_set(r"C:\a\other.exe"), an_order()).argv == (r"C:\a\other.exe",)


@pytest.mark.spec("scaler 30.10.1")
@pytest.mark.parametrize(
    ("limits", "properties"),
    [
        (Amount(cpus=0.001), ("--property=CPUQuota=1%",)),
        (Amount(cpus=1.5, memory_bytes=GIB), ("--property=CPUQuota=150%", "--property=MemoryMax=1073741824")),
        (Amount(memory_bytes=GIB), ("--property=MemoryMax=1073741824",)),
    ],
)
def test_limits_make_a_transient_scope(limits: Amount, properties: tuple[str, ...]) -> None:
    launch = launched(SYSTEMD, a_set(), an_order(limits=limits, enforce_cgroups=True))
    unit = f"kici-agent-{ID}"
    assert launch.argv == (
        *("systemd-run", "--user", "--scope", "--quiet", "--slice=kici-scaler", f"--unit={unit}"),
        *properties,
        "/opt/agent",
    )
    assert launch.unit == unit
    assert launch.group is None
    assert launch.env["XDG_RUNTIME_DIR"] == "/run/user/7", "systemd-run finds the manager by it"


def test_root_without_a_manager_of_its_own_asks_the_systems() -> None:
    host = replace(LINUX, systemd=Systemd.SYSTEM)
    argv = launched(host, a_set("kici-agent"), an_order(limits=Amount(cpus=1), enforce_cgroups=True)).argv
    assert argv[:2] == ("systemd-run", "--scope")


def test_a_scope_is_no_fork_of_a_prepared_process() -> None:
    order = an_order(limits=Amount(cpus=1), enforce_cgroups=True)
    assert not launched(SYSTEMD, a_set("kici-agent"), order).is_own_agent


@pytest.mark.parametrize("order", [an_order(enforce_cgroups=True), an_order(limits=Amount(cpus=2))])
def test_no_scope_without_both_a_limit_and_the_wish(order: LaunchOrder) -> None:
    assert launched(SYSTEMD, a_set(), order).argv == ("/opt/agent",)


@pytest.mark.spec("scaler 30.10.2")
@pytest.mark.parametrize("host", [MACOS, WINDOWS])
def test_enforce_cgroups_has_no_effect_elsewhere(host: LaunchHost) -> None:
    launch = launched(host, a_set(), an_order(limits=Amount(cpus=1), enforce_cgroups=True))
    assert launch.argv == ("/opt/agent",)
    assert launch.group is None


def test_where_systemd_does_not_run_groups_are_made_directly() -> None:
    order = an_order(limits=Amount(cpus=1.5, memory_bytes=GIB), enforce_cgroups=True)
    launch = launched(replace(LINUX, cgroups=V1), a_set("kici-agent"), order)
    assert launch.group == limits_plan(LimitsBy.V1, order.limits)
    assert launch.is_own_agent
    assert launched(replace(LINUX, cgroups=V2), a_set(), order).group == limits_plan(LimitsBy.V2, order.limits)
    assert launched(replace(LINUX, cgroups=V1), a_set(), an_order()).group == CgroupPlan(), "only to keep them together"


def test_limits_that_cannot_be_enforced_are_refused_with_the_reason() -> None:
    host = replace(LINUX, cgroups=CgroupSupport(tracking=True, problem="nothing was delegated"))
    reason = refused(host, a_set(), an_order(limits=Amount(cpus=1), enforce_cgroups=True))
    assert "nothing was delegated" in reason
    assert ID in reason


def test_settings_of_groups() -> None:
    both = Amount(cpus=1.5, memory_bytes=GIB)
    assert [(one.controller, one.file, one.value) for one in limits_plan(LimitsBy.V1, both).settings] == [
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("cpu", "cpu.cfs_quota_us", "150000"),
        ("memory", "memory.limit_in_bytes", "1073741824"),
        ("memory", "memory.memsw.limit_in_bytes", "1073741824"),
        ("pids", "pids.max", "4096"),
    ]
    assert [(one.controller, one.file, one.value) for one in limits_plan(LimitsBy.V2, both).settings] == [
        ("", "cpu.max", "150000 100000"),
        ("", "memory.max", "1073741824"),
        ("", "memory.swap.max", "0"),
        ("", "pids.max", "4096"),
    ]
    cpu_only = limits_plan(LimitsBy.V2, Amount(cpus=0.001)).settings
    assert cpu_only[0] == CgroupSetting("", "cpu.max", "1000 100000")
    assert all("memory" not in one.file for one in cpu_only)


@pytest.mark.parametrize(
    ("booted", "user", "root", "manager"),
    [
        (False, True, True, Systemd.NONE),
        (True, True, True, Systemd.USER),
        (True, True, False, Systemd.USER),
        (True, False, True, Systemd.SYSTEM),
        (True, False, False, Systemd.NONE),
    ],
)
def test_which_manager(booted: bool, user: bool, root: bool, manager: Systemd) -> None:
    assert systemd_of(is_booted=booted, has_user_manager=user, is_root=root) is manager


@pytest.mark.spec("scaler 30.10.12")
def test_a_set_without_a_program_names_the_label_it_needs() -> None:
    assert "kici:runtime:docker" in refused(LINUX, a_set(None, image="ubuntu"), an_order())


# --- Windows


@pytest.mark.parametrize("path", [r"C:\kici\agent.cmd", r"C:\my agents\a&b (1).BAT"])
def test_batch_files_go_through_cmd(path: str) -> None:
    launch = launched(WINDOWS, a_set(path), an_order())
    assert launch.argv == (r"D:\Win\cmd.exe", "/d", "/e:on", "/v:off", "/c", "call", path, "<NUL")


def test_cmd_without_comspec_is_the_systems() -> None:
    for environment, program in (({}, r"C:\Windows\System32\cmd.exe"), ({"SYSTEMROOT": "E:"}, r"E:\System32\cmd.exe")):
        host = replace(WINDOWS, environment=environment)
        assert launched(host, a_set(r"C:\a.cmd"), an_order()).argv[0] == program


@pytest.mark.spec("scaler 30.10.11")
@pytest.mark.parametrize("char", '"%^&|<>(),;=\n')
def test_batch_paths_that_cmd_reads_as_syntax_are_refused(char: str) -> None:
    path = rf"C:\kici\a{char}b.cmd"
    reason = refused(WINDOWS, a_set(path), an_order())
    assert repr(char) in reason
    assert batch_refusal(path, "linux") is None
    assert batch_refusal(path[:-3] + "exe", "win32") is None


@pytest.mark.parametrize("char", '"%^')
def test_quoting_does_not_disarm_everything(char: str) -> None:
    assert batch_refusal(rf"C:\my agents\a{char}b.cmd", "win32") is not None


@given(st.text(alphabet='abc "%^&|<>(),;=!', max_size=12))
def test_a_batch_path_that_passes_is_one_word_for_cmd(name: str) -> None:
    path = rf"C:\{name}.cmd"
    if batch_refusal(path, "win32") is None:
        assert not set(path) & set('"%^')
        assert " " in path or not set(path) & set("&|<>(),;=")


@pytest.mark.spec("scaler 30.10.9")
def test_taskkill() -> None:
    assert tree_kill_argv(WINDOWS, 77) == (r"D:\Win\System32\taskkill.exe", "/T", "/F", "/PID", "77")
    outcomes = {code: tree_kill_outcome(code) for code in (0, 128, 1, None)}
    assert outcomes == {0: TreeKill.ENDED, 128: TreeKill.ALREADY_GONE, 1: TreeKill.FAILED, None: TreeKill.FAILED}


# --- environment


def environment_of(host: Mapping[str, str], chosen: ProcessSet, order: LaunchOrder | None = None) -> Mapping[str, str]:
    return launched(replace(LINUX, environment=host), chosen, order or an_order()).env


def test_the_contract() -> None:
    env = environment_of({}, a_set(image="ubuntu:24.04", backpressure_mode="drop"))
    assert env == {
        "KICI_ORCHESTRATOR_URL": "ws://127.0.0.1:4000/ws",
        "KICI_AGENT_ID": ID,
        "KICI_LABELS": "linux,gpu,kici:scaler:local",
        "KICI_SCALER_MANAGED": "1",
        "KICI_EXECUTION_MODE": "bare-metal",
        "KICI_PORT": "0",
        "KICI_AGENT_TOKEN": "sesame",
        "KICI_BACKPRESSURE_MODE": "drop",
        "KICI_RUNTIME_IMAGE": "ubuntu:24.04",
    }
    bare = environment_of({}, a_set(), an_order(token=None))
    assert not {"KICI_AGENT_TOKEN", "KICI_BACKPRESSURE_MODE", "KICI_RUNTIME_IMAGE"} & bare.keys()


def test_precedence() -> None:
    """System < forwarded < contract < label set."""
    host = {
        "PATH": "/system",
        "KICI_AGENT_ENV_PATH": "/forwarded",
        "KICI_AGENT_ENV_KICI_PORT": "1",
        "KICI_AGENT_ENV_A": "forwarded",
        "KICI_AGENT_ENV_": "no name",
    }
    env = environment_of(host, a_set())
    assert (env["PATH"], env["KICI_PORT"], env["A"]) == ("/forwarded", "0", "forwarded")
    assert "" not in env
    env = environment_of(host, a_set(env={"PATH": "/set", "KICI_PORT": "2", "A": "set"}))
    assert (env["PATH"], env["KICI_PORT"], env["A"]) == ("/set", "2", "set")


SECRETS = {
    "KICI_DATABASE_URL": "postgres://u:p@h/d",
    "KICI_SECRET_KEY": "k",
    "KICI_TOKEN": "t",
    "DATABASE_URL": "postgres://h/d",
    "MY_STORE": "https://user:pass@example.com/x",
    "PGPASSWORD": "p",
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_SECRET": "s",
    "github_token": "t",
    "NPM_AUTH_TOKEN": "t",
    "SENTRY_DSN": "d",
    "NOTIFY_SOCKET": "@n",
}


@pytest.mark.spec("scaler 30.10.10")
@pytest.mark.spec("T3.10")
def test_an_agent_sees_nothing_of_the_coordinators_environment() -> None:
    env = environment_of({**SECRETS, "EDITOR": "vi", "PATH": "/bin", "TZ": "UTC"}, a_set())
    assert not SECRETS.keys() & env.keys()
    assert "EDITOR" not in env
    assert (env["PATH"], env["TZ"]) == ("/bin", "UTC")


@pytest.mark.spec("scaler 30.10.10")
@pytest.mark.spec("T3.10")
@pytest.mark.parametrize(
    ("given", "chosen"),
    [({}, a_set(env={"KICI_TRUSTED_ENV": "true"})), ({"KICI_AGENT_ENV_KICI_TRUSTED_ENV": "true"}, a_set())],
)
def test_trusted_mode_passes_all_but_secrets(given: dict[str, str], chosen: ProcessSet) -> None:
    plain = {"EDITOR": "vi", "PROXY": "http://proxy:3128", "GIT_URL": "ssh://git@host/x", "SSH_AUTH_SOCK": "/s"}
    env = environment_of({**SECRETS, **plain, **given}, chosen)
    assert not SECRETS.keys() & env.keys()
    assert plain.items() <= env.items()


def test_the_label_set_can_take_trust_back() -> None:
    host = {"KICI_AGENT_ENV_KICI_TRUSTED_ENV": "true", "EDITOR": "vi"}
    assert "EDITOR" not in environment_of(host, a_set(env={"KICI_TRUSTED_ENV": "false"}))


def test_windows_names_are_compared_without_case() -> None:
    env = launched(WINDOWS, a_set(r"C:\a.exe"), an_order()).env
    assert env["Path"] == r"C:\bin"
    assert env["ComSpec"] == r"D:\Win\cmd.exe"
    assert "SECRET" not in env


names = st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1, max_size=12)


@given(host=st.dictionaries(names, st.text(max_size=5)), own=st.dictionaries(names, st.text(max_size=5)))
def test_without_trust_nothing_of_the_host_but_its_system_part(host: dict[str, str], own: dict[str, str]) -> None:
    system = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TMPDIR", "TZ"}
    env = environment_of(host, a_set(env=own))
    for name, value in env.items():
        assert name in own or name.startswith("KICI_") or (name in system and host[name] == value)
    assert own.items() <= env.items()


def test_credentials_do_not_show_in_what_is_printed() -> None:
    order = an_order()
    chosen = a_set(env={"PASSWORD": "hunter2"})
    host = replace(LINUX, environment={"KICI_AGENT_ENV_X": "hunter2"})
    for value in (order, chosen, host, launched(host, chosen, order)):
        assert "sesame" not in repr(value)
        assert "hunter2" not in repr(value)
