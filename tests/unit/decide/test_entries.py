import pytest

from kici.config.model import BackendType, Defaults, LabelSet, RoleName, ScalerEntry, ScalersConfig
from kici.config.model import Cap as ConfigCap
from kici.decide.admit import Cap, HostCaps
from kici.decide.entries import Routable, host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.ids import ScalerName
from kici.domain.job import Demand
from kici.domain.platform import Arch, Host, Os, Platform
from kici.domain.resources import Ask, ResourceRequest

LINUX = Host(system="linux", machine="x86_64")
LINUX_ARM = Host(system="linux", machine="aarch64")
MAC = Host(system="darwin", machine="arm64")
ODD = Host(system="sunos", machine="sparc")
WINDOWS_ARM = Platform(Os.WINDOWS, Arch.ARM64)
WINDOWS = Platform(Os.WINDOWS, Arch.X64)


def scaler(
    *sets: tuple[str, ...],
    name: str = "s",
    type: BackendType = BackendType.CONTAINER,
    platform: Platform | None = None,
    mandatory: tuple[str, ...] = (),
    roles: tuple[RoleName, ...] | None = None,
) -> ScalerEntry:
    return ScalerEntry(
        name=ScalerName(name),
        type=type,
        max_agents=4,
        label_sets=tuple(LabelSet(labels=labels) for labels in sets),
        platform=platform,
        mandatory_labels=mandatory,
        roles=roles,
    )


def build(*entries: ScalerEntry, host: Host = LINUX) -> tuple[Routable, ...]:
    return routables(ScalersConfig(scalers=entries), host)


def match(entries: tuple[Routable, ...], *labels: str) -> Routable | None:
    return Router(entries).match(Demand(labels=frozenset(labels)))


def test_a_set_offers_its_labels_the_platform_and_the_system_labels() -> None:
    (only,) = build(scaler(("linux", "gpu"), name="pool"))
    assert only.offers == {
        "linux",
        "gpu",
        "kici:os:linux",
        "kici:arch:x64",
        "kici:arch:amd64",
        "kici:agent:container",
        "kici:scaler:pool",
        "kici:role:builder",
        "kici:role:init-runner",
    }
    assert only.gate == frozenset()


@pytest.mark.spec("scaler 4.6.1")
def test_a_declared_platform_taints() -> None:
    (only,) = build(scaler(("builders",), platform=WINDOWS_ARM))
    assert only.taints == ("windows", "arm64")
    assert only.gate == {"windows", "arm64"}
    assert {"windows", "arm64", "kici:os:windows", "kici:arch:arm64"} <= only.offers


@pytest.mark.spec("scaler 4.6.2")
def test_a_process_scaler_has_the_platform_of_its_host() -> None:
    (only,) = build(scaler(("builders",), type=BackendType.BARE_METAL), host=MAC)
    assert only.taints == ("macos", "arm64")


def test_a_process_scaler_on_an_unknown_host_offers_the_raw_names_and_has_no_taint() -> None:
    (only,) = build(scaler(("builders",), type=BackendType.BARE_METAL), host=ODD)
    assert {"kici:os:sunos", "kici:arch:sparc"} <= only.offers
    assert only.taints == ()
    assert only.gate == frozenset()


@pytest.mark.spec("scaler 4.6.3")
def test_containers_on_an_arm_host_offer_the_architecture_without_taint() -> None:
    (only,) = build(scaler(("linux",)), host=LINUX_ARM)
    assert "kici:arch:arm64" in only.offers
    assert "arm64" not in only.offers
    assert only.gate == frozenset()


def test_containers_on_a_mac_are_taken_for_linux() -> None:
    (only,) = build(scaler(("any",)), host=MAC)
    assert "kici:os:linux" in only.offers
    assert only.gate == frozenset()


@pytest.mark.spec("scaler 4.6.4")
def test_gates_are_of_a_set_not_of_the_scaler() -> None:
    entries = build(scaler(("linux", "gpu"), ("macos", "xcode")))
    assert [entry.gate for entry in entries] == [frozenset(), {"macos"}]
    assert [entry.set_index for entry in entries] == [0, 1]


@pytest.mark.spec("scaler 3.7.8")
def test_a_gate_cannot_be_applied_to_another_set() -> None:
    """Set and gate are one value, so lists of different lengths cannot exist; each set keeps its own."""
    entries = build(scaler(("macos", "a"), ("linux", "a")), scaler(("linux", "b"), name="t"))
    assert [(entry.label_set[0], bool(entry.gate)) for entry in entries] == [
        ("macos", True),
        ("linux", False),
        ("linux", False),
    ]


@pytest.mark.spec("scaler 4.6.5")
def test_mandatory_labels_and_handwritten_platform_labels_are_both_gates() -> None:
    (only,) = build(scaler(("windows", "team-a"), mandatory=("team-a",)))
    assert only.gate == {"team-a", "windows"}


@pytest.mark.spec("scaler 4.6.6", "scaler 2.4.3")
def test_a_platform_scaler_is_reached_by_naming_the_platform_and_its_agents_carry_it() -> None:
    entries = build(scaler(("builders",), platform=WINDOWS))
    assert match(entries, "builders") is None
    found = match(entries, "builders", "windows")
    assert found is not None
    assert found.agent_labels.count("windows") == 1


def test_an_offered_os_label_does_not_become_a_gate() -> None:
    (only,) = build(scaler(("builders",), platform=Platform(Os.MACOS, Arch.X64)))
    assert only.gate == {"macos"}
    assert "kici:os:darwin" in only.offers


@pytest.mark.spec("scaler 4.6.8")
def test_agents_of_an_event_scaler_carry_the_taint() -> None:
    (only,) = build(scaler(("a",), type=BackendType.EVENT, platform=Platform(Os.MACOS, Arch.X64)))
    assert "macos" in only.agent_labels


@pytest.mark.spec("scaler 5")
def test_a_retiring_scaler_takes_no_work() -> None:
    config = ScalersConfig(scalers=(scaler(("linux",), name="a"),))
    assert match(routables(config, LINUX, retiring={ScalerName("a")}), "linux") is None
    assert match(routables(config, LINUX), "linux") is not None


@pytest.mark.spec("scaler 5")
def test_a_job_can_ask_for_one_scaler_by_name() -> None:
    entries = build(scaler(("linux",), name="plain"), scaler(("linux", "gpu"), name="gpu-pool"))
    found = match(entries, "kici:scaler:gpu-pool")
    assert found is not None
    assert found.scaler == "gpu-pool"


@pytest.mark.spec("scaler 5", "scaler 2.4.2")
def test_a_scaler_offers_only_its_roles() -> None:
    assert match(build(scaler(("linux",), roles=(RoleName.BUILDER,))), "kici:role:init-runner") is None
    assert match(build(scaler(("linux",), roles=(RoleName.BUILDER,))), "kici:role:builder") is not None
    assert match(build(scaler(("linux",), roles=())), "kici:role:builder") is None
    assert match(build(scaler(("linux",))), "kici:role:init-runner") is not None


@pytest.mark.spec("scaler 18.7")
@pytest.mark.parametrize(
    ("type", "image", "binary", "expected"),
    [
        (BackendType.CONTAINER, "agent:1", None, True),
        (BackendType.BARE_METAL, "agent:1", None, True),
        (BackendType.BARE_METAL, "agent:1", "kici-agent", False),
        (BackendType.BARE_METAL, None, "kici-agent", False),
        (BackendType.FIRECRACKER, None, None, False),
        (BackendType.EVENT, None, None, False),
    ],
)
def test_who_starts_agents_inside_a_jobs_own_image(
    type: BackendType, image: str | None, binary: str | None, expected: bool
) -> None:
    label_set = LabelSet(labels=("a",), image=image, binary_path=binary)
    entry = ScalerEntry(name=ScalerName("s"), type=type, max_agents=1, label_sets=(label_set,))
    (only,) = build(entry)
    assert only.runs_job_image is expected


@pytest.mark.spec("scaler 6.4.1")
def test_resources_come_from_job_then_set_then_defaults() -> None:
    label_set = LabelSet(labels=("a",), resources=ResourceRequest(limits=Ask(cpus=4.0, memory="8g")))
    entry = ScalerEntry(name=ScalerName("s"), type=BackendType.EVENT, max_agents=1, label_sets=(label_set,))
    defaults = Defaults(resources=ResourceRequest(requests=Ask(cpus=9.0, memory="9g")))
    (only,) = routables(ScalersConfig(scalers=(entry,), defaults=defaults), LINUX)
    shape = only.shape(ResourceRequest(requests=Ask(cpus=1.0)))
    assert (shape.requests.cpus, shape.requests.memory_bytes) == (1.0, 8 << 30)
    assert (shape.limits.cpus, shape.limits.memory_bytes) == (1.0, 8 << 30)


def test_caps_are_those_of_the_configuration() -> None:
    config = ScalersConfig(
        global_max_agents=7,
        global_resource_cap=ConfigCap(max_cpu=8.0),
        scalers=(scaler(("a",)), scaler(("b",), name="e", type=BackendType.EVENT)),
    )
    assert host_caps(config) == HostCaps(agents_max=7, resources=Cap(cpus=8.0))
    local, event = (scaler_caps(entry) for entry in config.scalers)
    assert (local.agents_max, local.is_cluster_counted) == (4, False)
    assert event.is_cluster_counted
