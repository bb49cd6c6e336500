"""testing.engines: what is absent is named; what is required and absent stops the run."""

from pathlib import Path

import pytest

from kici.testing import engines


@pytest.fixture(autouse=True)
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_PROBES", {"here": lambda: None, "gone": lambda: "not installed"})
    engines.absence.cache_clear()


def test_a_present_engine_has_no_absence() -> None:
    assert engines.absence("here") is None


def test_an_absent_engine_says_why() -> None:
    assert engines.absence("gone") == "not installed"


def test_an_unknown_engine_is_an_error_that_names_the_known() -> None:
    with pytest.raises(LookupError, match="no engine is called 'oracle'"):
        engines.absence("oracle")


@pytest.mark.parametrize(
    ("required", "faults"),
    [("", []), ("here", []), (" here , ", []), ("here,gone", ["gone"]), ("gone,oracle", ["gone", "oracle"])],
)
def test_what_is_required_must_be_there(required: str, faults: list[str]) -> None:
    assert [sentence.split()[1] for sentence in engines.missing(required)] == faults


def test_initdb_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "initdb"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engines.postgres_bin() == tmp_path
