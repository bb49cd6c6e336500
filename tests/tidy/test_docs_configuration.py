"""What the documentation says of the configuration is what the code does."""

import re
from pathlib import Path

import pytest

from kici.config.docstrings import key_docs
from kici.config.environment import coordinator_names
from kici.config.load import Loaded, load_scalers
from kici.config.model import LabelSet, ScalerEntry, ScalersConfig
from kici.config.reference import configuration_page
from kici.config.shapes import table_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "configuration.md"
EXAMPLES = ROOT / "docs" / "examples"
SHIPPED = ROOT / "src" / "kici" / "config" / "example.yaml"


def is_scalers_file(path: Path) -> bool:
    """Examples of other things may live beside ours."""
    return path.parent.name != "scalers.d" and path.read_text().startswith("#") and "\nversion: 1\n" in path.read_text()


def loaded(path: Path) -> Loaded:
    directory = path.parent / "scalers.d"
    return load_scalers(path, directory if directory.is_dir() else None)


FILES = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if is_scalers_file(path)]


def test_the_reference_page_is_what_the_model_says() -> None:
    assert PAGE.read_text() == configuration_page(), "run `make docs`"


@pytest.mark.parametrize("model", [ScalersConfig, ScalerEntry, LabelSet])
def test_every_key_has_a_row(model: type) -> None:
    page = configuration_page()
    for name, text in key_docs(table_of(model)).items():
        assert f"| `{name}` |" in page
        assert re.sub(r"<|`", "", text)[:40] in re.sub(r"&lt;|`", "", page)


def test_every_variable_has_a_row() -> None:
    page = configuration_page()
    assert [name for name in coordinator_names() if f"| `{name}` |" not in page] == []


def test_there_are_examples() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", [SHIPPED, *FILES], ids=lambda path: path.name)
def test_an_example_is_right_and_wise(path: Path) -> None:
    result = loaded(path)
    assert [str(problem) for problem in result.problems] == []
    assert [str(notice) for notice in result.warnings] == []


def test_examples_show_every_kind_of_scaler() -> None:
    configs = [loaded(path).config for path in FILES]
    kinds = {entry.type.value for config in configs if config is not None for entry in config.scalers}
    assert kinds == {"container", "bare-metal", "firecracker", "event"}
