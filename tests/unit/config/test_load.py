"""Files: the main one, those of a directory, and where their mistakes are told to be."""

import platform
import sys
from pathlib import Path

import pytest

from kici.config.load import default_scalers, load_scalers
from kici.config.model import BackendType
from kici.decide.entries import routables
from kici.domain.platform import Host
from kici.testing.scalers_files import scaler, text

LINUX = Host("linux", "x86_64")


def event(name: str, labels: str = "x", *, indent: str = "") -> str:
    entry = (
        f"- {{name: {name}, type: event, maxAgents: 1, provisioningTargets: [t], labelSets: [{{labels: [{labels}]}}]}}"
    )
    return f"{indent}{entry}\n"


@pytest.fixture
def main(tmp_path: Path) -> Path:
    path = tmp_path / "scalers.yaml"
    path.write_text("version: 1\n")
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "scalers.d"
    path.mkdir()
    return path


def names(main: Path | None, directory: Path | None) -> list[str]:
    loaded = load_scalers(main, directory)
    assert loaded.config is not None, "\n".join(map(str, loaded.problems))
    return [entry.name for entry in loaded.config.scalers]


def told(main: Path | None, directory: Path | None) -> list[str]:
    """Problems, each with the name of its file only."""
    loaded = load_scalers(main, directory)
    assert loaded.config is None
    return [str(problem).removeprefix(str(Path(problem.file).parent) + "/") for problem in loaded.problems]


@pytest.mark.spec("scaler 1.8.13")
def test_files_of_the_directory_follow_the_main_file_by_their_names(main: Path, directory: Path) -> None:
    main.write_text(text("scalers:\n") + event("main", "m"))
    (directory / "b.yaml").write_text("scalers:\n" + event("b", "b"))
    (directory / "a.yml").write_text("scalers:\n" + event("a1", "a1") + event("a2", "a2"))
    assert names(main, directory) == ["main", "a1", "a2", "b"]


def test_only_visible_yaml_files_of_the_directory_itself_count(main: Path, directory: Path) -> None:
    (directory / "a.yaml").write_text("scalers:\n" + event("a"))
    (directory / "b.yaml.bak").write_text("nonsense: [")
    (directory / ".c.yaml").write_text("nonsense: [")
    (directory / "README").write_text("nonsense: [")
    (directory / "deep.yaml").mkdir()
    (directory / "deep.yaml" / "d.yaml").write_text("nonsense: [")
    assert names(main, directory) == ["a"]


def test_a_main_file_without_scalers_needs_a_directory_that_has_some(main: Path, directory: Path) -> None:
    assert told(main, None)[0].startswith("scalers.yaml:1:1: scalers: found nothing")
    assert told(main, directory)[0].startswith("scalers.yaml:1:1: scalers: found nothing")
    (directory / "a.yaml").write_text("scalers:\n" + event("a"))
    assert names(main, directory) == ["a"]


def test_a_directory_alone_is_enough(directory: Path) -> None:
    (directory / "a.yaml").write_text("version: 1\nscalers:\n" + event("a"))
    assert names(None, directory) == ["a"]


def test_a_file_of_the_directory_says_nothing_about_the_whole(main: Path, directory: Path) -> None:
    (directory / "a.yaml").write_text("version: 2\nglobalMaxAgents: 3\nscallers: []\nx-own: 1\nscalers:\n" + event("a"))
    found = told(main, directory)
    assert [line.split(": found")[0] for line in found] == [
        "a.yaml:1:10: version",
        "a.yaml:2:1: globalMaxAgents",
        "a.yaml:3:1: scallers",
    ]
    assert "it belongs at the top level of the main file" in found[1]
    assert "did you mean scalers?" in found[2]


def test_mistakes_of_several_files_are_told_together_each_in_its_own_file(main: Path, directory: Path) -> None:
    main.write_text("version: 1\nscalers:\n" + event("one", "a") + "nope: 1\n")
    (directory / "a.yaml").write_text("scalers: [\n")
    (directory / "b.yaml").write_text("scalers:\n" + event("two", "b") + event("ONE", "c"))
    (directory / "c.yaml").write_text("scalers:\n" + event("three", "a") + event("four", "kici:x"))
    assert [line.split(": found")[0] for line in told(main, directory)] == [
        "scalers.yaml:4:1: nope",
        "a.yaml:2:1",
        "b.yaml:3:10: scalers[1].name",
        "c.yaml:2:91: scalers[0].labelSets[0].labels",
        "c.yaml:3:91: scalers[1].labelSets[0].labels[0]",
    ]


def test_a_broken_main_file_does_not_hide_what_is_wrong_elsewhere(main: Path, directory: Path) -> None:
    main.write_text("version: [")
    (directory / "a.yaml").write_text("scalers:\n- {name: a, machinePool: x}\n")
    found = told(main, directory)
    assert [line.split(": found")[0] for line in found] == [
        "scalers.yaml:2:1",
        "a.yaml:2:3: scalers[0].type",
        "a.yaml:2:3: scalers[0].maxAgents",
        "a.yaml:2:3: scalers[0].labelSets",
    ]


def test_a_file_without_scalers_is_worth_a_warning(main: Path, directory: Path) -> None:
    (directory / "a.yaml").write_text("scalers:\n" + event("a"))
    (directory / "b.yaml").write_text("# scalers: later\n")
    (directory / "c.yaml").write_text("version: 1\n")
    (directory / "d.yaml").write_text("scalers: []\n")
    loaded = load_scalers(main, directory)
    assert [Path(notice.file).name for notice in loaded.warnings] == ["b.yaml", "c.yaml"]


def test_advice_about_a_file_of_the_directory_names_its_place_there(main: Path, directory: Path) -> None:
    main.write_text(text("scalers:\n") + event("main", "m"))
    (directory / "a.yaml").write_text(scaler(sets="- {labels: [macos], binaryPath: a}"))
    (notice,) = load_scalers(main, directory).warnings
    assert (Path(notice.file).name, notice.line, notice.path) == ("a.yaml", 3, "scalers[0]")


def test_files_that_cannot_be_read_are_problems(main: Path, tmp_path: Path) -> None:
    assert told(tmp_path / "gone.yaml", None) == [
        "gone.yaml:1:1: found no such file or directory, expected a readable file"
    ]
    assert "expected a readable directory of scaler files" in told(main, tmp_path / "gone.d")[0]
    assert "found is a directory" in told(tmp_path, None)[0]


def test_no_file_at_all_means_processes_of_this_host() -> None:
    loaded = load_scalers(None, None)
    assert loaded.config == default_scalers(Host(sys.platform, platform.machine()))
    (local,) = default_scalers(LINUX).scalers
    assert (local.name, local.type, local.max_agents) == ("local", BackendType.BARE_METAL, 16)
    assert (local.label_sets[0].labels, local.label_sets[0].binary_path) == (("linux", "x64", "local"), "kici-agent")


@pytest.mark.spec("scaler 4.6.2")
@pytest.mark.parametrize(
    ("host", "labels", "gate"),
    [
        (LINUX, {"linux", "x64"}, set()),
        (Host("linux", "aarch64"), {"linux", "arm64"}, {"arm64"}),
        (Host("darwin", "arm64"), {"macos", "arm64"}, {"macos", "arm64"}),
        (Host("darwin", "x86_64"), {"macos", "x64"}, {"macos"}),
        (Host("win32", "AMD64"), {"windows", "x64"}, {"windows"}),
        (Host("linux", "riscv64"), {"linux", "riscv64"}, set()),
    ],
    ids=lambda value: value.machine if isinstance(value, Host) else "-".join(sorted(value)),
)
def test_without_a_file_labels_say_what_the_host_is(host: Host, labels: set[str], gate: set[str]) -> None:
    (routable,) = routables(default_scalers(host), host)
    assert set(routable.label_set) == {*labels, "local"}
    assert routable.gate == gate
    assert routable.offers >= routable.gate


def test_the_default_is_what_a_file_could_say() -> None:
    from kici.config.load import load_text

    document = scaler(
        "name: local\ntype: bare-metal\nmaxAgents: 16", "- {labels: [linux, x64, local], binaryPath: kici-agent}"
    )
    assert load_text(document.encode()).config == default_scalers(LINUX)
