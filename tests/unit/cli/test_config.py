"""`kici config`: what it prints, and what it exits with."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
from click.testing import CliRunner, Result

from kici.cli.config import config
from kici.testing.scalers_files import MICROVM, MICROVM_SET, SET, scaler, text

WRONG = text("scaler: []\nglobalMaxAgents: 0\nscalers: []\n")


def run(*arguments: str | Path, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
    clean: dict[str, str | None] = {"KICI_SCALER_CONFIG_PATH": None, "KICI_SCALER_CONFIG_DIR": None}
    return CliRunner().invoke(config, [str(each) for each in arguments], input=stdin, env=clean | (env or {}))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "scalers.yaml"
    path.write_text(scaler())
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.yaml"
    path.write_text(WRONG)
    return path


def test_a_valid_file_is_summed_up(good: Path) -> None:
    result = run("check", good)
    assert (result.exit_code, result.output) == (0, "valid: 1 scaler, 1 label set, 0 warnings\n")


def test_every_problem_is_one_line_with_its_place_and_the_exit_code_is_2(bad: Path) -> None:
    result = run("check", bad)
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"{bad}:2:1: scaler: found an unknown key, expected a key of the top level (did you mean scalers?)",
        f"{bad}:3:18: globalMaxAgents: found the number 0, expected a whole number, 1 or more",
    ]


def test_warnings_are_told_and_are_no_failure(good: Path) -> None:
    good.write_text(scaler(sets="- {labels: [macos], binaryPath: x}"))
    result = run("check", good)
    assert result.exit_code == 0
    assert result.output.splitlines()[0].endswith("(warning)")
    assert "1 warning" in result.output.splitlines()[-1]


def test_programs_get_json(good: Path, bad: Path) -> None:
    assert json.loads(run("check", "--json", good).output) == {
        "valid": True,
        "problems": [],
        "problemsDropped": 0,
        "warnings": [],
        "scalers": ["host"],
    }
    result = run("check", "--json", bad)
    assert result.exit_code == 2
    assert [(each["line"], each["column"], each["path"]) for each in json.loads(result.output)["problems"]] == [
        (2, 1, "scaler"),
        (3, 18, "globalMaxAgents"),
    ]


def test_standard_input_is_a_file_too() -> None:
    assert run("check", "-", stdin=scaler()).exit_code == 0
    assert run("check", "-", stdin=WRONG).output.startswith("<stdin>:2:1: scaler")
    assert "name a file" in run("check", "-", "--scalers-dir", "x", stdin=scaler()).output


def test_a_directory_adds_its_files(tmp_path: Path, good: Path) -> None:
    folder = tmp_path / "scalers.d"
    folder.mkdir()
    (folder / "a.yaml").write_text(scaler("name: second\ntype: bare-metal\nmaxAgents: 1", SET.replace("linux", "b")))
    assert "valid: 2 scalers" in run("check", good, "--scalers-dir", folder).output
    assert "valid: 1 scaler," in run("check", "--scalers-dir", folder).output


def test_the_environment_names_files_unless_a_file_is_given(tmp_path: Path, good: Path, bad: Path) -> None:
    folder = tmp_path / "scalers.d"
    folder.mkdir()
    (folder / "a.yaml").write_text(WRONG)
    environ = {"KICI_SCALER_CONFIG_PATH": str(bad), "KICI_SCALER_CONFIG_DIR": str(folder)}
    assert run("check", env=environ).exit_code == 2
    assert run("check", good, env=environ).exit_code == 0


def test_without_a_file_there_is_nothing_to_check() -> None:
    result = run("check")
    assert result.exit_code == 2
    assert "kici config example" in result.output


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    result = run("check", tmp_path / "gone.yaml")
    assert result.exit_code == 2
    assert "found no such file or directory" in result.output


def test_the_example_is_valid_and_commented() -> None:
    example = run("example")
    assert example.exit_code == 0
    assert example.output.count("#") > 10
    assert run("check", "-", stdin=example.output).output == "valid: 4 scalers, 5 label sets, 0 warnings\n"


def test_the_schema_is_a_schema() -> None:
    schema = json.loads(run("schema").output)
    assert jsonschema_rs.meta.is_valid(schema)


def test_an_explanation_needs_a_valid_file(bad: Path) -> None:
    result = run("explain", bad)
    assert result.exit_code == 2
    assert "globalMaxAgents" in result.output
    assert json.loads(run("explain", "--json", bad).output)["valid"] is False


def test_without_a_file_the_default_is_explained() -> None:
    result = run("explain")
    assert result.exit_code == 0
    assert "local (bare-metal)" in result.output
    assert "program kici-agent of this installation" in result.output


def explained(document: str) -> str:
    result = run("explain", "-", stdin=document)
    assert result.exit_code == 0, result.output
    return result.output


def test_labels_gates_and_sizes_are_told() -> None:
    told = explained(
        scaler(
            sets="""\
            - labels: [gpu]
              binaryPath: /opt/agent
              resources: {requests: {cpus: 0.5}, limits: {cpus: 2, memory: 3g}}
            """,
            more="""\
            mandatoryLabels: [gpu]
            platform: {os: windows, arch: x64}
            resourceCap: {maxCpu: 8}
            machinePool: box
            """,
            top="machinePools: [{name: box, cap: {maxMemory: 512m}}]\nglobalResourceCap: {maxMemory: 64g}",
        )
    )
    assert "At most 50 agents in all, requesting 64 GiB together." in told
    assert "Machine pool box: 512 MiB" in told
    assert "platform    windows/x64\n" in told
    assert "caps        8 cpus together, machine pool box" in told
    assert "gate      jobs must name gpu, windows" in told
    assert "kici:os:win32" in told
    assert "kici:scaler:host" in told
    assert "size      requests 0.5 cpus and 3 GiB, is limited to 2 cpus and 3 GiB" in told
    assert "runs in   program /opt/agent\n" in told
    assert "each runs   one job\n" in told


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (text("scalers: []\n"), "No scalers"),
        (scaler(), "not declared: counts against numbers of agents only"),
        (scaler(), "none; jobs without labels may come here"),
        (scaler(sets="- {labels: [a], image: x}"), "runs in   the job's own image"),
        (scaler(more="reuse: {idleSeconds: 9, maxJobs: 3}"), "up to 3 jobs, waiting 9 s"),
        (scaler(more="reuse: {}"), "any number of jobs, waiting 60 s"),
        (scaler(more="warmPool: {enabled: true, size: 2}"), "warm      stays empty: no resources are declared"),
        (scaler(more="warmPool: {enabled: true, size: 2}", top="defaults: {resources: {cpus: 1}}"), "2 kept ready"),
        (scaler(MICROVM, MICROVM_SET), "machine   2 vcpus, 4096 MiB"),
        (scaler(MICROVM, MICROVM_SET), "microVMs of firecracker, jailed"),
        (scaler(MICROVM, MICROVM_SET), "kernel /opt/vmlinux"),
        (scaler(MICROVM, MICROVM_SET, more="vmm: qemu"), "microVMs of qemu, acceleration auto"),
        (
            scaler("name: c\ntype: container\nmaxAgents: 1\nhost: tcp://e:1", "- {labels: [a], image: x}"),
            "containers of the engine at tcp://e:1",
        ),
        (
            scaler("name: c\ntype: container\nmaxAgents: 1\nruntime: podman", "- {labels: [a], image: x}"),
            "containers of podman on this host",
        ),
        (
            scaler("name: c\ntype: container\nmaxAgents: 1", "- {labels: [a], image: x, imagePullPolicy: Never}"),
            "image x, pulled never",
        ),
        (
            scaler("name: e\ntype: event\nmaxAgents: 1\nprovisioningTargets: [t, u]", "- labels: [a]"),
            "machines made by t, u",
        ),
    ],
)
def test_each_kind_of_scaler_is_told_in_words(document: str, words: str) -> None:
    assert words in explained(document)


def test_an_explanation_is_json_for_programs() -> None:
    document = json.loads(run("explain", "--json", "-", stdin=scaler()).output)
    (only,) = document["scalers"]
    assert only["name"] == "host"
    assert only["labelSets"][0]["labels"] == ["linux"]
    assert only["labelSets"][0]["warmPool"] == {"size": 0, "obstacle": None}
