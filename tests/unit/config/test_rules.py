"""Rules between values, and that all of them are told together."""

from collections.abc import Iterator

import pytest

from kici.config import advice, rules
from kici.config.problems import PROBLEMS_MAX
from kici.config.walker import PROBLEMS_COUNTED_MAX
from kici.testing.scalers_files import (
    BARE_METAL,
    MICROVM,
    MICROVM_SET,
    SET,
    config,
    load,
    problem,
    problems,
    scaler,
    text,
    warnings,
)

SEVEN_MISTAKES = """\
version: 1
globalMaxAgents: many
machinePools:
  - {name: box, cap: {maxMemory: 64gb}}
scalers:
  - name: a
    type: container
    maxAgents: 0
    machinePool: bax
    labelSets:
      - labels: [linux, 'kici:x']
        image: agent:1
  - name: A
    type: bare-metal
    maxAgents: 2
    labelSets:
      - labels: [gpu]
        binarypath: kici-agent
"""


def test_a_file_with_seven_mistakes_is_told_seven_things_with_their_places() -> None:
    found = problems(SEVEN_MISTAKES.replace("bax", "box"))
    assert [line.split(": found")[0] for line in found] == [
        "2:18: globalMaxAgents",
        "4:34: machinePools[0].cap.maxMemory",
        "8:16: scalers[0].maxAgents",
        "11:25: scalers[0].labelSets[0].labels[1]",
        "13:11: scalers[1].name",
        "17:9: scalers[1].labelSets[0].binaryPath",
        "18:9: scalers[1].labelSets[0].binarypath",
    ]


def test_a_rule_is_silent_about_what_could_not_be_read() -> None:
    assert problem(scaler(sets="- {labels: [linux], binaryPath: 5}")).split(": found")[0].endswith("binaryPath")
    assert problem(scaler("name: a\ntype: nonsense\nmaxAgents: 1", SET)).split(": found")[0].endswith("type")
    broken_pools = (
        text("machinePools: {a: b}\nscalers:\n")
        + "".join(f"  {line}\n" for line in ("- name: a", "  type: event", "  maxAgents: 1", "  machinePool: x"))
        + "    provisioningTargets: [t]\n    labelSets: [{labels: [a]}]\n"
    )
    assert problem(broken_pools).split(": found")[0].endswith("machinePools")


def test_a_file_of_mistakes_is_told_in_bounded_length() -> None:
    loaded = load(text("scalers: []\n") + "".join(f"key{number}: 1\n" for number in range(PROBLEMS_MAX + 7)))
    assert len(loaded.problems) == PROBLEMS_MAX
    assert loaded.problems_dropped == 7


def test_at_some_point_nobody_counts_mistakes_any_more() -> None:
    loaded = load(text("scalers:\n") + "- 1\n" * 30_000)
    assert len(loaded.problems) == PROBLEMS_MAX
    assert loaded.problems_dropped == PROBLEMS_COUNTED_MAX


# --- one scaler


@pytest.mark.spec("scaler 1.8.11")
@pytest.mark.parametrize("targets", ["", "provisioningTargets: []"])
def test_an_event_scaler_names_somebody_to_ask(targets: str) -> None:
    found = problem(scaler("name: e\ntype: event\nmaxAgents: 1", "- labels: [a]", more=targets))
    assert "scalers[0].provisioningTargets: found" in found


def test_a_container_set_has_an_image() -> None:
    assert "labelSets[0].image: found nothing" in problem(
        scaler("name: c\ntype: container\nmaxAgents: 1", "- labels: [a]")
    )


def test_a_process_set_has_a_program_or_an_image() -> None:
    assert "labelSets[0].binaryPath: found nothing" in problem(scaler(sets="- labels: [a]"))
    assert problems(scaler(sets="- {labels: [a], image: x}")) == []


def test_a_microvm_set_has_a_root_file_system() -> None:
    assert "labelSets[0].rootfsPath: found nothing" in problem(scaler(MICROVM, "- labels: [vm]"))


def test_a_jailed_microvm_has_its_programs_its_kernel_and_its_user() -> None:
    found = problems(scaler("name: v\ntype: firecracker\nmaxAgents: 1", MICROVM_SET))
    assert [line.split(": ")[1].split(".")[1] for line in found] == [
        *("kernelPath", "firecrackerPath", "jailerPath", "uid", "gid"),
    ]


def test_qemu_needs_neither_jailer_nor_user() -> None:
    head = "name: v\ntype: firecracker\nmaxAgents: 1\nvmm: qemu"
    assert problems(scaler(head, MICROVM_SET, more="accel: tcg\nkernelPath: /k")) == []
    assert "kernelPath: found nothing" in problem(scaler(head, MICROVM_SET))


def test_firecracker_does_not_emulate() -> None:
    assert "accel: found emulation" in problem(scaler(MICROVM, MICROVM_SET, more="accel: tcg"))
    assert problems(scaler(MICROVM, MICROVM_SET, more="accel: kvm")) == []


@pytest.mark.spec("scaler 1.8.12")
def test_the_firecracker_program_has_the_name_that_the_jailer_gives_its_directories() -> None:
    renamed = MICROVM.replace("/opt/firecracker", "/opt/fc/firecracker-v1.10")
    assert 'found a file called "firecracker-v1.10"' in problem(scaler(renamed, MICROVM_SET))


def test_guests_understand_one_spelling_of_extra_hosts() -> None:
    assert (
        problems(scaler(MICROVM, MICROVM_SET, more="extraHosts: ['a:10.0.0.1', 'b:fd00::1', 'c:host-gateway']")) == []
    )
    assert "write a:10.0.0.1" in problem(scaler(MICROVM, MICROVM_SET, more="extraHosts: ['a=10.0.0.1']"))


@pytest.mark.spec("scaler 1.8.7")
def test_a_set_that_nobody_could_ask_for_is_refused() -> None:
    found = problem(scaler(more="mandatoryLabels: [gpu]"))
    assert found.startswith("8:17: scalers[0].labelSets[0].labels: found no gpu among [linux]")


@pytest.mark.spec("scaler 1.8.8")
def test_the_taint_of_a_declared_platform_can_be_asked_for() -> None:
    document = scaler(sets="- {labels: [builders], binaryPath: a}", more="platform: {os: windows, arch: x64}")
    assert problems(document) == []


def test_a_mandatory_label_may_be_a_taint() -> None:
    assert problems(scaler(more="platform: {os: linux, arch: arm64}\nmandatoryLabels: [ARM64]")) == []


@pytest.mark.spec("scaler 1.8.9")
def test_a_pool_is_declared_once_and_before_it_is_used() -> None:
    twice = "machinePools: [{name: a, cap: {}}, {name: a, cap: {}}]"
    assert problem(scaler(top=twice)).startswith("2:43: machinePools[1].name: found")
    assert "it declares none" in problem(scaler(more="machinePool: x"))
    found = problem(scaler(top="machinePools: [{name: build-host, cap: {}}]", more="machinePool: build_host"))
    assert "did you mean build-host?" in found
    assert problems(scaler(top="machinePools: [{name: a, cap: {}}]", more="machinePool: a")) == []


@pytest.mark.spec("scaler 30.10.11")
@pytest.mark.parametrize("path", ["C:\\ci&cd\\agent.cmd", "C:\\a^b.BAT", "C:\\x (1)\\%a%.cmd"])
def test_a_batch_path_that_windows_reads_as_syntax_is_refused(path: str) -> None:
    sets = f"- {{labels: [b], binaryPath: '{path}'}}"
    assert "cmd.exe" in problem(scaler(sets=sets, more="platform: {os: windows, arch: x64}"))
    assert problems(scaler(sets=sets, more="platform: {os: linux, arch: x64}")) == []


@pytest.mark.parametrize("path", ["C:\\kici\\agent.cmd", "C:\\x (1)\\agent.cmd", "C:\\a&b\\agent.exe"])
def test_other_windows_paths_are_fine(path: str) -> None:
    sets = f"- {{labels: [b], binaryPath: '{path}'}}"
    assert problems(scaler(sets=sets, more="platform: {os: windows, arch: x64}")) == []


# --- several scalers


def two(first: str, second: str, *, names: tuple[str, str] = ("x", "y")) -> str:
    entries = [
        f"  - {{name: {name}, type: event, maxAgents: 1, provisioningTargets: [t], labelSets: {sets}}}\n"
        for name, sets in zip(names, (first, second), strict=True)
    ]
    return text("scalers:\n") + "".join(entries)


def test_names_are_unique_whatever_their_case() -> None:
    found = problem(two("[{labels: [a]}]", "[{labels: [b]}]", names=("Gpu", "gPU")))
    assert 'scalers[1].name: found "gPU" again' in found


@pytest.mark.spec("scaler 3.7.9")
def test_a_label_set_belongs_to_one_scaler() -> None:
    found = problem(two("[{labels: [Linux, a]}]", "[{labels: [b]}, {labels: [A, linux]}]"))
    assert "scalers[1].labelSets[1].labels: found the same labels as in scaler x" in found
    assert problems(two("[{labels: [linux]}, {labels: [linux]}]", "[{labels: [b]}]")) == []


def test_an_aliased_scaler_is_a_second_scaler() -> None:
    entry = "{name: a, type: event, maxAgents: 1, provisioningTargets: [t], labelSets: [{labels: [x]}]}"
    found = problems(text(f"scalers: [&one {entry}, *one]\n"))
    assert [line.split(": found")[0].split(": ")[1] for line in found] == [
        "scalers[1].name",
        "scalers[1].labelSets[0].labels",
    ]


# --- the bridge


@pytest.mark.parametrize(
    ("bridge", "key"),
    [
        ("{cidr: 10.9.0.0/24, gateway: 10.8.0.1}", "gateway"),
        ("{cidr: 10.9.0.0/24, gateway: 10.9.0.0}", "gateway"),
        ("{cidr: 10.9.0.0/24, gateway: 10.9.0.255}", "gateway"),
        ("{cidr: 10.9.0.0/24, netmask: 255.255.0.0}", "netmask"),
        ("{cidr: 10.9.0.0/31}", "cidr"),
        ("{cidr: 10.9.0.7}", "cidr"),
    ],
)
def test_the_parts_of_the_bridge_fit_together(bridge: str, key: str) -> None:
    assert f"firecracker.{key}: found" in problem(text(f"firecracker: {bridge}\nscalers: []\n"))


# --- advice


@pytest.mark.spec("scaler 4.6.7")
def test_platform_labels_by_hand_are_one_warning_for_each_scaler() -> None:
    sets = "- {labels: [darwin, a], binaryPath: x}\n- {labels: [darwin, b], binaryPath: x}\n"
    (found,) = warnings(scaler(sets=sets))
    assert found.startswith("scalers[0]: darwin in the labels of scaler host only looks like a platform")
    assert warnings(scaler(sets=sets, more="platform: {os: macos, arch: x64}")) == []


@pytest.mark.parametrize(
    ("document", "about"),
    [
        (scaler(more="socketPath: /run/docker.sock"), "scalers[0].socketPath: socketPath has no effect"),
        (scaler(sets=f"{SET}  rootfsPath: /r"), "scalers[0].labelSets[0].rootfsPath: rootfsPath has no effect"),
        (scaler(MICROVM, "- {labels: [vm], rootfsPath: /r}"), "scalers[0].labelSets[0]: a guest with 512 MiB"),
        (scaler(more="warmPool: {enabled: true}"), "scalers[0].warmPool: a warm pool of size 0"),
        (scaler(more="warmPool: {enabled: true, size: 1}"), "scalers[0].labelSets[0]: no warm agents here"),
        (scaler(top="globalMaxAgents: 1"), "scalers[0].maxAgents: globalMaxAgents lets"),
        (scaler(sets="- {labels: [a], binaryPath: bin/agent}"), "labelSets[0].binaryPath: a relative path"),
        (scaler(sets="- {labels: [a], binaryPath: x, networkPolicy: {denyAll: true}}"), "this policy is not enforced"),
        (scaler(sets=SET + SET), "labelSets[1].labels: these labels were given before"),
        (scaler(more="enforceCgroups: true\nplatform: {os: macos, arch: x64}"), "no control groups on macos"),
        (scaler(sets="- {labels: [a], binaryPath: x, env: {KICI_LABLES: b}}"), "did you mean KICI_LABELS?"),
        (scaler(more="resourceCap: {maxCpu: 1}", top="defaults: {resources: {cpus: 2}}"), "more than the resourceCap"),
        (
            scaler(sets="- {labels: [a], binaryPath: x, resources: {requests: {cpus: 2}, limits: {cpus: 1}}}"),
            "requests more than its limits",
        ),
        (
            scaler(
                "name: c\ntype: container\nmaxAgents: 1",
                "- {labels: [a], image: x}",
                more="host: tcp://e:1\nsocketPath: /s",
            ),
            "socketPath: host names a remote engine",
        ),
        (scaler(MICROVM, MICROVM_SET, more="vmm: qemu"), "uid: uid has no effect with vmm: qemu"),
        (
            scaler(more="warmPool: {enabled: true, size: 3}", top="defaults: {resources: {cpus: 2}}"),
            "3 warm agents are wanted, and maxAgents is 2",
        ),
    ],
)
def test_what_is_valid_but_hardly_meant_is_a_warning(document: str, about: str) -> None:
    found = warnings(document)
    assert any(about in line for line in found), found


@pytest.mark.parametrize(
    "document",
    [
        scaler(),
        scaler(sets="- {labels: [a], binaryPath: x, env: {KICI_TRUSTED_ENV: 'true', OTHER: x}}"),
        scaler(more="warmPool: {enabled: true, size: 2}", top="defaults: {resources: {cpus: 2}}"),
        scaler(MICROVM, MICROVM_SET),
        scaler(MICROVM, "- {labels: [vm], rootfsPath: /r, resources: {memory: 4g}}"),
    ],
)
def test_a_sensible_file_is_left_alone(document: str) -> None:
    assert warnings(document) == []


def test_every_piece_of_advice_and_every_rule_has_a_name_that_reads_as_a_sentence() -> None:
    def functions() -> Iterator[str]:
        for table in (rules.ENTRY_RULES, rules.CONFIG_RULES, advice.ENTRY_ADVICE):
            yield from (function.__name__ for function in table)

    names = list(functions())
    assert len(set(names)) == len(names)
    assert all(name.count("_") >= 1 for name in names)


def test_a_config_finds_its_scalers_and_pools_by_name() -> None:
    loaded = config(scaler(BARE_METAL, top="machinePools: [{name: box, cap: {maxCpu: 4}}]"))
    assert loaded.scaler("host") is loaded.scalers[0]
    assert loaded.scaler("other") is None
    pool = loaded.machine_pool("box")
    assert pool is not None
    assert pool.cap.max_cpu == 4
    assert loaded.machine_pool("other") is None
