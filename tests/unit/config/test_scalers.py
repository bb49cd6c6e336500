"""What a scalers file says once it is read: defaults, spellings, and what each key refuses."""

from ipaddress import IPv4Address, IPv4Network

import pytest

from kici.config.grammar import ExtraHost, HostAccess
from kici.config.model import (
    Accel,
    BackendType,
    Cap,
    LabelSet,
    NetworkPolicy,
    PullPolicy,
    Reuse,
    RoleName,
    Runtime,
    ScalerEntry,
    Vmm,
    WarmPool,
)
from kici.domain.platform import Arch, Os, Platform
from kici.domain.resources import Amount, Ask, ResourceRequest
from kici.testing.scalers_files import (
    MICROVM,
    MICROVM_SET,
    config,
    entry,
    label_set,
    problem,
    problems,
    scaler,
    text,
)

CONTAINER = "name: c\ntype: container\nmaxAgents: 2\n"
CONTAINER_SET = "- labels: [linux]\n  image: agent:1\n"
EVENT = "name: e\ntype: event\nmaxAgents: 2\n"
EVENT_SET = "- labels: [linux]\n"


# --- the whole


@pytest.mark.spec("scaler 1.8.1")
@pytest.mark.parametrize("version", ["2", "'1'", "true", "1.5", "null", "[1]"])
def test_only_version_1_is_known(version: str) -> None:
    assert problem(f"version: {version}\nscalers: []\n").startswith("1:10: version: found")


def test_the_version_must_be_stated() -> None:
    assert problem("scalers: []\n") == "1:1: version: found nothing, expected the number 1 (it is required)"


def test_an_empty_file_is_told_what_it_lacks() -> None:
    assert [line.split(", ")[0] for line in problems("")] == [
        "1:1: version: found nothing",
        "1:1: scalers: found nothing",
    ]


@pytest.mark.parametrize("document", ["[]", "text", "12"])
def test_a_file_is_a_mapping(document: str) -> None:
    assert problem(document).startswith("1:1: found ")


@pytest.mark.spec("scaler 1.8.2")
def test_defaults_are_filled_in() -> None:
    loaded = config(scaler())
    assert loaded.global_max_agents == 50
    only = loaded.scalers[0]
    assert only == ScalerEntry(
        name=only.name,
        type=BackendType.BARE_METAL,
        max_agents=2,
        label_sets=(LabelSet(labels=("linux",), binary_path="kici-agent"),),
    )
    assert (only.max_concurrent_spawns, only.runtime, only.network_isolation) == (8, Runtime.AUTO, True)
    assert (only.chroot_base_dir, only.vcpu_count, only.mem_size_mib) == ("/srv/jailer", 2, 512)
    assert (only.claim_ttl_seconds, only.agent_token_ttl_seconds) == (300, 600)
    assert (only.vmm, only.accel, only.reuse) == (Vmm.FIRECRACKER, Accel.AUTO, None)
    assert only.warm_pool == WarmPool(enabled=False, size=0, idle_timeout_seconds=300)
    assert only.label_sets[0].image_pull_policy is PullPolicy.IF_NOT_PRESENT
    assert only.label_sets[0].network_policy == NetworkPolicy(allowlist=(), deny_all=False, host_access=None)
    assert only.label_sets[0].overlay_drive_size_mib == 2048


def test_the_bridge_has_defaults_and_follows_its_network() -> None:
    bridge = config("version: 1\nscalers: []\n").firecracker
    assert (str(bridge.cidr), bridge.bridge_name, bridge.table) == ("10.0.0.0/24", "kici-br0", "kici")
    assert (str(bridge.gateway_address), str(bridge.guest_netmask)) == ("10.0.0.1", "255.255.255.0")
    assert bridge.auto_provision_host
    moved = config("version: 1\nscalers: []\nfirecracker: {cidr: 10.9.0.0/16}\n").firecracker
    assert (moved.gateway_address, moved.guest_netmask) == (IPv4Address("10.9.0.1"), IPv4Address("255.255.0.0"))


def test_keys_of_the_author_are_ignored_at_the_top_only() -> None:
    document = text("x-common: &set [linux, gpu]\nscalers: []\n")
    assert config(document).scalers == ()
    assert "x-common: found an unknown key" in problem(scaler(more="x-common: 1"))


# --- labels


@pytest.mark.spec("scaler 1.8.3")
def test_labels_of_the_orchestrator_cannot_be_declared() -> None:
    found = problems(
        scaler(sets="- {labels: ['KICI:role:x', linux], binaryPath: a}", more="mandatoryLabels: ['kici:os:x']")
    )
    assert [line.split(": found")[0] for line in found] == [
        "6:23: scalers[0].mandatoryLabels[0]",
        "8:19: scalers[0].labelSets[0].labels[0]",
    ]


@pytest.mark.spec("scaler 1.8.4")
def test_labels_are_stored_trimmed_and_in_lower_case() -> None:
    assert label_set(scaler(sets="- {labels: [' Linux ', GPU, linux], binaryPath: a}")).labels == ("linux", "gpu")


@pytest.mark.parametrize("label", ["''", "'  '", "'a,b'", "3.10", "true", "null", "[x]", '"a\\nb"', "x" * 257])
def test_a_label_is_one_word_of_text(label: str) -> None:
    assert "scalers[0].labelSets[0].labels[0]" in problem(scaler(sets=f"- {{labels: [{label}], binaryPath: a}}"))


def test_an_unquoted_number_is_told_to_be_quoted() -> None:
    assert 'write it in quotes: "3.10"' in problem(scaler(sets="- {labels: [3.10], binaryPath: a}"))


@pytest.mark.parametrize("labels", ["[]", "linux", "{linux: 1}", "null"])
def test_a_set_has_at_least_one_label(labels: str) -> None:
    assert ".labels: found" in problem(scaler(sets=f"- {{labels: {labels}, binaryPath: a}}"))


def test_a_scaler_has_at_least_one_set() -> None:
    assert "scalers[0].labelSets: found an empty list" in problem(
        text("scalers:\n  - {name: a, type: event, maxAgents: 1, provisioningTargets: [t], labelSets: []}\n")
    )


# --- names


@pytest.mark.parametrize("name", ["''", "' '", "'a,b'", "' a'", "12", "x" * 129])
def test_a_name_fits_into_a_label(name: str) -> None:
    assert "scalers[0].name" in problem(scaler(f"name: {name}\ntype: bare-metal\nmaxAgents: 1"))


@pytest.mark.parametrize("name", ["gpu-machines", "GPU machines", "team/a", "ä"])
def test_other_names_are_free(name: str) -> None:
    assert entry(scaler(f"name: {name}\ntype: bare-metal\nmaxAgents: 1")).name == name


@pytest.mark.parametrize("pool", ["../x", "a/b", ".x", "''", "x" * 65])
def test_a_pool_name_is_a_file_name(pool: str) -> None:
    assert "machinePools[0].name" in problem(
        text(f"machinePools: [{{name: '{pool.strip(chr(39))}', cap: {{}}}}]\nscalers: []\n")
    )


# --- numbers, words, flags


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "'3'", "many", "true", "null", ".inf", ".nan", "1e400"])
def test_a_count_is_a_whole_number_above_nothing(number: str) -> None:
    assert "scalers[0].maxAgents: found" in problem(scaler(f"name: a\ntype: bare-metal\nmaxAgents: {number}"))


@pytest.mark.parametrize("number", ["3", "3.0", "0x3"])
def test_a_count_may_be_written_in_several_ways(number: str) -> None:
    assert entry(scaler(f"name: a\ntype: bare-metal\nmaxAgents: {number}")).max_agents == 3


def test_a_wrong_word_is_answered_with_the_near_one() -> None:
    assert "did you mean bare-metal?" in problem(scaler("name: a\ntype: baremetal\nmaxAgents: 1"))


def test_kubernetes_is_no_type_here() -> None:
    assert "expected container, bare-metal, firecracker or event" in problem(
        scaler("name: a\ntype: kubernetes\nmaxAgents: 1")
    )


@pytest.mark.parametrize("flag", ["no", "'true'", "1", "off"])
def test_a_flag_is_true_or_false(flag: str) -> None:
    assert "requireSudo: found" in problem(scaler(more=f"requireSudo: {flag}"))


def test_a_flag_of_older_yaml_is_told_what_to_write() -> None:
    assert "write false, without quotes" in problem(scaler(more="requireSudo: no"))


def test_an_empty_key_is_told_to_go_or_get_a_value() -> None:
    assert "give it a value, or take the key out" in problem(scaler(more="warmPool:"))


@pytest.mark.spec("scaler 1.8.10")
@pytest.mark.parametrize(
    ("roles", "meant"),
    [
        ("[all, builder]", None),
        ("[]", ()),
        ("[builder, builder]", (RoleName.BUILDER,)),
        ("[init-runner, builder]", (RoleName.INIT_RUNNER, RoleName.BUILDER)),
    ],
)
def test_all_roles_are_the_same_as_none_named(roles: str, meant: tuple[RoleName, ...] | None) -> None:
    assert entry(scaler(more=f"roles: {roles}")).roles == meant


def test_a_platform_names_both_parts() -> None:
    assert entry(scaler(more="platform: {os: windows, arch: arm64}")).platform == Platform(Os.WINDOWS, Arch.ARM64)
    assert "platform.arch: found nothing" in problem(scaler(more="platform: {os: linux}"))
    assert "did you mean macos?" in problem(scaler(more="platform: {os: macOS, arch: x64}"))


def test_reuse_has_an_idle_time_and_may_have_a_limit() -> None:
    assert entry(scaler(more="reuse: {}")).reuse == Reuse(idle_seconds=60, max_jobs=None)
    assert entry(scaler(more="reuse: {idleSeconds: 5, maxJobs: 3}")).reuse == Reuse(idle_seconds=5, max_jobs=3)
    assert "reuse.idleSeconds" in problem(scaler(more="reuse: {idleSeconds: 0}"))


# --- resources and caps


@pytest.mark.spec("scaler 1.8.5")
def test_flat_resources_mean_both_sides() -> None:
    both = Ask(cpus=2, memory="4g")
    assert label_set(scaler(sets="- {labels: [a], binaryPath: a, resources: {cpus: 2, memory: 4g}}")).resources == (
        ResourceRequest(requests=both, limits=both)
    )


@pytest.mark.spec("scaler 1.8.6")
def test_one_side_alone_stays_alone_until_it_is_resolved() -> None:
    loaded = label_set(scaler(sets="- {labels: [a], binaryPath: a, resources: {limits: {cpus: 2}}}")).resources
    assert loaded == ResourceRequest(limits=Ask(cpus=2))


def test_defaults_have_the_same_shape() -> None:
    loaded = config(text("defaults: {resources: {requests: {memory: 1g}}}\nscalers: []\n")).defaults.resources
    assert loaded == ResourceRequest(requests=Ask(memory="1g"))


def test_flat_and_nested_resources_do_not_mix() -> None:
    assert "resources.cpus: found an unknown key" in problem(
        scaler(sets="- {labels: [a], binaryPath: a, resources: {cpus: 2, limits: {cpus: 2}}}")
    )


@pytest.mark.parametrize("cpus", ["0", "-1", "256.5", "'2'", "two"])
def test_cpus_are_bounded(cpus: str) -> None:
    assert ".cpus: found" in problem(scaler(sets=f"- {{labels: [a], binaryPath: a, resources: {{cpus: {cpus}}}}}"))


@pytest.mark.spec("scaler 1.8.14")
@pytest.mark.parametrize("memory", ["4g", "4Gi", "512Mi", "'512 m'", "1.5G"])
def test_both_spellings_of_memory_are_read(memory: str) -> None:
    sides = label_set(scaler(sets=f"- {{labels: [a], binaryPath: a, resources: {{memory: {memory}}}}}")).resources
    assert sides.limits.memory == memory.strip("'")


@pytest.mark.parametrize(
    ("memory", "hint"),
    [("2gb", 'did you mean "2g"?'), ("'512'", "512m"), ("512", "512m"), ("4Q", ""), ("-1g", ""), ("0g", "more than")],
)
def test_a_bad_memory_string_is_found_at_load(memory: str, hint: str) -> None:
    found = problem(scaler(sets=f"- {{labels: [a], binaryPath: a, resources: {{memory: {memory}}}}}"))
    assert ".memory: found" in found
    assert hint in found


def test_caps_are_amounts_and_a_missing_side_is_no_cap() -> None:
    loaded = config(
        text(
            """\
            globalResourceCap: {maxCpu: 12.5}
            machinePools: [{name: box, cap: {maxMemory: 64Gi}}]
            scalers: []
            """
        )
    )
    assert loaded.global_resource_cap == Cap(max_cpu=12.5, max_memory_bytes=None)
    assert loaded.machine_pools[0].cap == Cap(max_cpu=None, max_memory_bytes=64 * 1024**3)
    assert "resourceCap.maxMemory: found" in problem(scaler(more="resourceCap: {maxMemory: 4Q}"))
    assert "did you mean maxCpu?" in problem(scaler(more="resourceCap: {maxCpus: 4}"))


def test_a_microvm_is_as_large_as_the_nearest_layer_says() -> None:
    only = entry(scaler(MICROVM, "- {labels: [vm], rootfsPath: /r, memSizeMib: 3000}", more="vcpuCount: 4"))
    assert only.vm_size(only.label_sets[0], Amount()) == (4, 3000)
    assert only.vm_size(only.label_sets[0], Amount(cpus=2.5, memory_bytes=5 * 1024**3 + 1)) == (3, 5120)


# --- network


@pytest.mark.spec("scaler 31.7.4")
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("5000", HostAccess(network=None, port=5000)),
        ("'5000'", HostAccess(network=None, port=5000)),
        ("'*:10143'", HostAccess(network=None, port=10143)),
        ("192.168.1.40", HostAccess(network=IPv4Network("192.168.1.40/32"), port=None)),
        ("'10.98.0.0/24:443'", HostAccess(network=IPv4Network("10.98.0.0/24"), port=443)),
        ("'10.0.0.0/8:*'", HostAccess(network=IPv4Network("10.0.0.0/8"), port=None)),
        ("10.0.0.0/8", HostAccess(network=IPv4Network("10.0.0.0/8"), port=None)),
        ("'*:*'", HostAccess(network=None, port=None)),
        ("'*'", HostAccess(network=None, port=None)),
        ("'*:443'", HostAccess(network=None, port=443)),
        ("443", HostAccess(network=None, port=443)),
        ("'10.0.0.0/8:22'", HostAccess(network=IPv4Network("10.0.0.0/8"), port=22)),
    ],
)
def test_host_access_is_an_address_and_a_port(written: str, meant: HostAccess) -> None:
    policy = label_set(scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{hostAccess: [{written}]}}")).network_policy
    assert policy.host_access == (meant,)


@pytest.mark.spec("scaler 31.7.4")
@pytest.mark.parametrize(
    "written",
    [
        "0",
        "65536",
        "70000",
        "1.2.3.999",
        "'/33'",
        "example.com:80",
        "db.internal:5432",
        "'*:0'",
        "'10.0.0.0/24:70000'",
        "'10.0.0.1/24:443'",
        "'::1'",
        "''",
        "true",
        "'10.0.0.1:'",
        "'10.0.0.1:80:90'",
    ],
)
def test_host_access_refuses_everything_else(written: str) -> None:
    assert "hostAccess[0]: found" in problem(
        scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{hostAccess: [{written}]}}")
    )


def test_host_access_may_be_empty_or_absent() -> None:
    assert (
        label_set(scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{hostAccess: []}}")).network_policy.host_access
        == ()
    )
    assert label_set(scaler(CONTAINER, CONTAINER_SET)).network_policy.host_access is None


def test_host_access_is_told_as_it_is_written() -> None:
    written = ["*:5000", "192.168.1.40:*", "10.98.0.0/24:443", "*:*"]
    policy = label_set(scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{hostAccess: {written}}}")).network_policy
    assert [str(each) for each in policy.host_access or ()] == written


def test_an_allowlist_holds_networks() -> None:
    policy = label_set(
        scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{allowlist: [10.1.0.0/16, 10.9.9.9]}}")
    ).network_policy
    assert policy.allowlist == (IPv4Network("10.1.0.0/16"), IPv4Network("10.9.9.9/32"))


@pytest.mark.parametrize(
    ("written", "hint"), [("10.1.0.5/16", "did you mean 10.1.0.0/16?"), ("fd00::/8", "IPv4"), ("intranet", "IPv4")]
)
def test_an_allowlist_refuses_what_is_no_network(written: str, hint: str) -> None:
    assert hint in problem(scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{allowlist: ['{written}']}}"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("db:10.0.0.5", ExtraHost(name="db", address="10.0.0.5")),
        ("host.docker.internal:host-gateway", ExtraHost(name="host.docker.internal", address="host-gateway")),
        ("v6:fd00::1", ExtraHost(name="v6", address="fd00::1")),
        ("db=10.0.0.5", ExtraHost(name="db", address="10.0.0.5", plain=False)),
        ("v6:[fd00::1]", ExtraHost(name="v6", address="fd00::1", plain=False)),
    ],
)
def test_engines_know_several_spellings_of_extra_hosts(written: str, meant: ExtraHost) -> None:
    assert entry(scaler(CONTAINER, CONTAINER_SET, more=f"extraHosts: ['{written}']")).extra_hosts == (meant,)


@pytest.mark.parametrize(
    "written", ["db", "db:", ":10.0.0.5", "db:name", "d b:10.0.0.5", "db:10.0.0.300", "", "-x:10.0.0.1"]
)
def test_an_extra_host_is_a_name_and_an_address(written: str) -> None:
    assert "extraHosts[0]: found" in problem(scaler(CONTAINER, CONTAINER_SET, more=f"extraHosts: ['{written}']"))


@pytest.mark.parametrize(
    "url", ["http://x", "10.0.0.1:4000", "ws://", "ws:///ws", "ws://a b", "ws://x:99999/", "wss:x", ""]
)
def test_agents_are_given_a_websocket_url(url: str) -> None:
    assert "orchestratorUrl: found" in problem(scaler(more=f"orchestratorUrl: '{url}'"))


def test_a_web_url_is_answered_with_the_websocket_one() -> None:
    assert "wss://ci.example/ws" in problem(scaler(more="orchestratorUrl: https://ci.example/ws"))


@pytest.mark.parametrize("url", ["tcp://192.168.1.10:2376", "https://engine.internal"])
def test_a_remote_engine_has_a_url(url: str) -> None:
    assert entry(scaler(CONTAINER, CONTAINER_SET, more=f"host: {url}")).host == url


@pytest.mark.parametrize("url", ["192.168.1.10:2376", "unix:///var/run/docker.sock", "ssh://box", "tcp://"])
def test_a_remote_engine_is_refused_by_any_other_name(url: str) -> None:
    assert "scalers[0].host: found" in problem(scaler(CONTAINER, CONTAINER_SET, more=f"host: '{url}'"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cidr", "10.0.0.0"),
        ("cidr", "10.0.0.0/24x"),
        ("gateway", "10.0.0"),
        ("netmask", "255.0.255.0"),
        ("bridgeName", "a-name-that-is-too-long"),
        ("bridgeName", "br/0"),
        ("table", "1x"),
        ("autoProvisionHost", "yes"),
    ],
)
def test_the_bridge_is_described_in_the_forms_of_its_tools(key: str, value: str) -> None:
    assert f"firecracker.{key}: found" in problem(text(f"firecracker: {{{key}: {value}}}\nscalers: []\n"))


# --- the rest


@pytest.mark.parametrize(
    "written", ["/srv/cache:/cache", "/srv/cache:/cache:ro", "C:\\cache:/cache", "named:/cache:ro,z"]
)
def test_volumes_are_bind_mounts(written: str) -> None:
    assert label_set(scaler(CONTAINER, f"{CONTAINER_SET}  volumes: ['{written}']")).volumes == (written,)


@pytest.mark.parametrize("written", ["/srv/cache", "/srv/cache:cache", ":/cache", ""])
def test_a_volume_has_two_ends(written: str) -> None:
    assert "volumes[0]: found" in problem(scaler(CONTAINER, f"{CONTAINER_SET}  volumes: ['{written}']"))


def test_variables_are_text() -> None:
    found = problems(scaler(sets="- labels: [a]\n  binaryPath: a\n  env: {A: '1', B: 1, C: true, D: '', 'E=': x}\n"))
    assert [line.split(": ")[1] for line in found] == [
        f"scalers[0].labelSets[0].env.{name}" for name in ("B", "C", "E=")
    ]
    assert label_set(scaler(sets="- {labels: [a], binaryPath: a, env: {A: '1', D: ''}}")).env == {"A": "1", "D": ""}


def test_an_image_has_no_blanks() -> None:
    assert "image: found" in problem(scaler(CONTAINER, "- {labels: [a], image: 'agent latest'}"))


def test_a_microvm_is_read_whole() -> None:
    only = entry(scaler(MICROVM, MICROVM_SET))
    assert (only.uid, only.gid, only.kernel_path) == (100, 100, "/opt/vmlinux")
    assert only.label_sets[0].mem_size_mib == 4096


def test_an_event_scaler_is_read_whole() -> None:
    only = entry(scaler(EVENT, EVENT_SET, more="provisioningTargets: [org/infra, https://hook.example]"))
    assert only.provisioning_targets == ("org/infra", "https://hook.example")


@pytest.mark.parametrize(
    ("document", "hint"),
    [
        (scaler(more="maxagents: 3"), "did you mean maxAgents?"),
        (scaler(more="image: x"), "it belongs in labelSets[]"),
        (scaler(sets="- {labels: [a], binaryPath: a, maxAgents: 1}"), "it belongs in scalers[]"),
        (scaler(more="globalMaxAgents: 3"), "it belongs at the top level of the main file"),
        (scaler(more="warmPool: {enabled: true, sise: 2}"), "did you mean size?"),
        (scaler(CONTAINER, f"{CONTAINER_SET}  networkPolicy: {{denyall: true}}"), "did you mean denyAll?"),
        (text("firecracker: {brigdeName: x}\nscalers: []\n"), "did you mean bridgeName?"),
        (text("defaults: {resource: {}}\nscalers: []\n"), "did you mean resources?"),
        (text("scaler: []\nscalers: []\n"), "did you mean scalers?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_known_one(document: str, hint: str) -> None:
    found = problem(document)
    assert "found an unknown key" in found
    assert hint in found
