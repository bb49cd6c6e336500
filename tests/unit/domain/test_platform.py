"""Platforms: what hosts are called, which labels and taints follow, and the gate of a set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.domain.platform import (
    PLAIN_PLATFORM_LABELS,
    Arch,
    Host,
    Os,
    Platform,
    gate_of,
    os_arch_labels,
    plain_taints,
    structured_taints,
)

PLATFORMS = st.builds(Platform, st.sampled_from(Os), st.sampled_from(Arch))
LABELS = st.lists(st.sampled_from(["linux", "gpu", "Windows", "darwin", " ARM64 ", "team-a"]), max_size=5)


@pytest.mark.parametrize(
    ("system", "machine", "platform"),
    [
        ("linux", "x86_64", Platform(Os.LINUX, Arch.X64)),
        ("linux", "aarch64", Platform(Os.LINUX, Arch.ARM64)),
        ("darwin", "arm64", Platform(Os.MACOS, Arch.ARM64)),
        ("win32", "AMD64", Platform(Os.WINDOWS, Arch.X64)),
        ("freebsd14", "amd64", None),
        ("linux", "riscv64", None),
    ],
)
def test_a_host_is_called_by_its_platform_where_there_is_one(
    system: str, machine: str, platform: Platform | None
) -> None:
    assert Host(system, machine).platform == platform


@pytest.mark.parametrize(
    ("system", "machine", "labels"),
    [
        ("linux", "x64", ("kici:os:linux", "kici:arch:x64", "kici:arch:amd64")),
        ("darwin", "arm64", ("kici:os:macos", "kici:os:darwin", "kici:arch:arm64")),
        ("win32", "AMD64", ("kici:os:windows", "kici:os:win32", "kici:arch:x64", "kici:arch:amd64")),
        ("freebsd14", "riscv64", ("kici:os:freebsd14", "kici:arch:riscv64")),
    ],
)
def test_automatic_labels_know_both_names_of_a_platform(system: str, machine: str, labels: tuple[str, ...]) -> None:
    assert os_arch_labels(system, machine) == labels


@given(PLATFORMS)
def test_declared_and_raw_names_of_a_platform_give_the_same_labels(platform: Platform) -> None:
    raw = {Os.LINUX: "linux", Os.MACOS: "darwin", Os.WINDOWS: "win32"}[platform.os]
    machine = {Arch.X64: "x86_64", Arch.ARM64: "aarch64"}[platform.arch]
    assert os_arch_labels(platform.os.value, platform.arch.value) == os_arch_labels(raw, machine)


@pytest.mark.spec("scaler 4.6.1")
def test_every_deviation_from_linux_on_x64_is_a_taint() -> None:
    assert structured_taints(Platform(Os.WINDOWS, Arch.ARM64)) == ("windows", "arm64")
    assert structured_taints(Platform(Os.LINUX, Arch.X64)) == ()


@pytest.mark.spec("scaler 4.6.2")
def test_an_apple_host_taints_its_processes() -> None:
    assert structured_taints(Host("darwin", "arm64").platform) == ("macos", "arm64")


def test_no_platform_means_no_taint() -> None:
    assert structured_taints(None) == ()


def test_plain_platform_labels_are_taints_once_and_in_their_order() -> None:
    assert plain_taints(["darwin", "gpu", " MacOS ", "darwin", "linux", "x64"]) == ("darwin", "macos")


@pytest.mark.spec("scaler 4.6.4")
def test_each_set_has_a_gate_of_its_own() -> None:
    assert gate_of([], None, ["linux", "gpu"]) == frozenset()
    assert gate_of([], None, ["macos", "xcode"]) == {"macos"}


@pytest.mark.spec("scaler 4.6.5")
def test_a_gate_joins_mandatory_labels_and_taints() -> None:
    assert gate_of(["team-a"], None, ["windows", "team-a"]) == {"team-a", "windows"}


def test_an_automatic_label_does_not_become_a_second_taint() -> None:
    platform = Platform(Os.MACOS, Arch.X64)
    assert gate_of([], platform, ["builders"]) == {"macos"}


@given(st.lists(st.sampled_from(["team-a", "gpu"])), st.none() | PLATFORMS, LABELS)
def test_a_gate_is_exactly_its_three_parts(mandatory: list[str], platform: Platform | None, labels: list[str]) -> None:
    gate = gate_of(mandatory, platform, labels)
    assert set(mandatory) <= gate
    assert set(structured_taints(platform)) <= gate
    rest = gate - set(mandatory) - set(structured_taints(platform))
    assert rest <= PLAIN_PLATFORM_LABELS & {label.strip().lower() for label in labels}
