"""Scalers files as operators write them."""

import os
from pathlib import Path

import pytest

from kici.config.load import load_scalers
from kici.config.schema import scalers_schema
from kici.decide.entries import routables
from kici.domain.platform import Host

CASES = Path(os.environ.get("KICI_CASES") or Path(__file__).parents[4] / "shared" / "cases") / "configs"
WHOLE = sorted(CASES.glob("*.yaml"))
INVALID = sorted(CASES.glob("invalid/*.yaml"))
LINUX = Host("linux", "x86_64")

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no cases at {CASES}; KICI_CASES names their folder")


def test_the_cases_are_there() -> None:
    assert len(WHOLE) >= 10
    assert len(INVALID) >= 1


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.name)
def test_a_file_of_an_operator_is_accepted(path: Path) -> None:
    loaded = load_scalers(path, None)
    assert loaded.problems == ()
    assert loaded.config is not None


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.name)
def test_an_invalid_file_is_refused_and_each_problem_has_its_place(path: Path) -> None:
    loaded = load_scalers(path, None)
    assert loaded.config is None
    lines = path.read_text().splitlines()
    for problem in loaded.problems:
        assert problem.path
        assert 1 <= problem.line <= len(lines)
        assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1


def test_an_entry_without_a_name_is_told_everything_that_it_lacks() -> None:
    loaded = load_scalers(CASES / "invalid" / "firecracker-entry-without-name.yaml", None)
    told = {problem.path: (problem.line, problem.column) for problem in loaded.problems}
    assert told["version"] == (1, 1)
    assert told["scalers[0].name"] == (2, 5)
    assert told["scalers[0].rootfsPath"] == (3, 5)
    assert told["scalers[0].labels"] == (5, 5)
    assert {"maxAgents", "labelSets", "firecrackerPath", "jailerPath", "uid", "gid"} <= {
        path.removeprefix("scalers[0].") for path in told
    }


def test_a_split_configuration_needs_its_directory() -> None:
    main, directory = CASES / "split" / "scalers.yaml", CASES / "split" / "scalers.d"
    together = load_scalers(main, directory)
    assert together.config is not None
    assert [entry.name for entry in together.config.scalers] == ["container-linux", "gpu-machines"]
    assert [problem.path for problem in load_scalers(main, None).problems] == ["scalers"]


def test_a_configuration_may_scale_nothing() -> None:
    loaded = load_scalers(CASES / "scales-nothing.yaml", None)
    assert loaded.config is not None
    assert loaded.config.scalers == ()


def test_platform_labels_by_hand_are_accepted_with_a_warning_and_gate_the_set() -> None:
    loaded = load_scalers(CASES / "bare-metal-macos.yaml", None)
    assert loaded.config is not None
    (notice,) = loaded.warnings
    assert "platform: {os: ..., arch: ...}" in notice.text
    (only,) = routables(loaded.config, LINUX)
    assert only.gate == {"macos", "darwin"}


def test_a_set_with_arm64_is_gated_on_it() -> None:
    loaded = load_scalers(CASES / "firecracker-two-architectures.yaml", None)
    assert loaded.config is not None
    assert [routable.gate for routable in routables(loaded.config, LINUX)] == [frozenset(), frozenset({"arm64"})]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.name)
def test_a_file_of_an_operator_fits_the_schema(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    jsonschema = pytest.importorskip("jsonschema_rs")
    jsonschema.validate(scalers_schema(), yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.name)
def test_an_invalid_file_does_not_fit_the_schema(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    jsonschema = pytest.importorskip("jsonschema_rs")
    assert not jsonschema.is_valid(scalers_schema(), yaml.safe_load(path.read_text()))
