"""Whatever is in a file or an environment: never a crash, always an answer that adds up."""

import contextlib
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema_rs
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kici.config.environment import SettingsRefused, known_names, read_settings
from kici.config.load import Loaded, load_scalers, load_text
from kici.config.model import LabelSet, ScalerEntry, ScalersConfig, WarmPool
from kici.config.schema import scalers_schema
from kici.config.shapes import table_of

EXAMPLE = (Path(__file__).parents[2] / "src" / "kici" / "config" / "example.yaml").read_text()
SCHEMA = jsonschema_rs.validator_for(scalers_schema())
KEYS = sorted({name for model in (ScalersConfig, ScalerEntry, LabelSet, WarmPool) for name in table_of(model).keys})

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["container", "bare-metal", "event", "linux", "2g", "10.0.0.0/24", "5000", "ws://h/ws", "qemu"]),
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=15,
)

WORDS = st.text("abcXYZ-", min_size=1, max_size=6).map(lambda text: f"x{text}")
SETS = st.lists(WORDS, min_size=1, max_size=3, unique_by=str.lower)
NAMES = st.lists(WORDS, min_size=1, max_size=4, unique_by=str.lower)
RESOURCES = st.fixed_dictionaries(
    {}, optional={"cpus": st.integers(1, 256), "memory": st.sampled_from(["1g", "512Mi"])}
)


@st.composite
def entries(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A valid event or bare-metal scaler whose label sets carry its name, so that no two scalers share one."""
    kind = draw(st.sampled_from(["event", "bare-metal"]))
    needs = {"provisioningTargets": ["t"]} if kind == "event" else {}
    sets = [
        {"labels": [f"of-{name}", *labels], "resources": draw(RESOURCES)}
        | ({} if kind == "event" else {"binaryPath": "kici-agent"})
        for labels in draw(st.lists(SETS, min_size=1, max_size=3))
    ]
    optional = st.fixed_dictionaries(
        {},
        optional={
            "maxConcurrentSpawns": st.integers(1, 99),
            "warmPool": st.fixed_dictionaries({"enabled": st.booleans(), "size": st.integers(0, 3)}),
            "roles": st.lists(st.sampled_from(["builder", "init-runner", "all"]), max_size=3),
            "reuse": st.just({"idleSeconds": 5}),
        },
    )
    return {
        "name": name,
        "type": kind,
        "maxAgents": draw(st.integers(1, 50)),
        "labelSets": sets,
        **needs,
        **draw(optional),
    }


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    return {"version": 1, "scalers": [draw(entries(name)) for name in draw(NAMES)]}


def checked(loaded: Loaded) -> Loaded:
    """Every answer is a configuration or problems, never both, and every place is a place."""
    assert (loaded.config is None) == bool(loaded.problems)
    told = [*map(str, loaded.problems), *map(str, loaded.warnings)]
    assert all(re.match(r"scalers\.yaml:[1-9]\d*:[1-9]\d*: [^\n]+\Z", line) for line in told), told
    return loaded


def loads(document: object) -> Loaded:
    return checked(load_text(json.dumps(document).encode()))


@given(st.binary(max_size=200))
def test_no_bytes_crash_it(data: bytes) -> None:
    checked(load_text(data))


@given(st.text(st.sampled_from("ab:-[]{},&*!|>'\"#%@ \n\t?~0."), max_size=60))
def test_no_punctuation_crashes_it(text: str) -> None:
    checked(load_text(text.encode()))


@given(ANYTHING | st.floats() | st.lists(st.floats()))
def test_no_structure_crashes_it(document: object) -> None:
    with contextlib.suppress(yaml.YAMLError):
        checked(load_text(yaml.safe_dump(document, allow_unicode=True).encode()))


@given(
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=6),
    st.lists(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=8), max_size=3),
)
def test_no_half_right_file_crashes_it(top: dict[str, Any], scalers: list[dict[str, Any]]) -> None:
    loads({**top, "version": 1, "scalers": scalers})


@given(st.data())
@settings(max_examples=60)
def test_no_slip_of_the_hand_crashes_it(data: st.DataObject) -> None:
    text = EXAMPLE
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 20))
        text = text[:start] + data.draw(st.text(st.sampled_from("a:-[]{} \n'#&*"), max_size=5)) + text[start + length :]
    checked(load_text(text.encode()))


@given(documents())
def test_a_valid_document_is_read_as_it_is_written(document: dict[str, Any]) -> None:
    config = loads(document).config
    assert config is not None
    for written, read in zip(document["scalers"], config.scalers, strict=True):
        assert (read.name, read.type.value, read.max_agents) == (written["name"], written["type"], written["maxAgents"])
        assert read.max_concurrent_spawns == written.get("maxConcurrentSpawns", 8)
        assert [list(each.labels) for each in read.label_sets] == [
            list(dict.fromkeys(label.lower() for label in each["labels"])) for each in written["labelSets"]
        ]
        roles = written.get("roles")
        assert read.role_names == (None if roles is None or "all" in roles else tuple(dict.fromkeys(roles)))


@given(documents())
def test_a_valid_document_fits_the_schema(document: dict[str, Any]) -> None:
    assert SCHEMA.is_valid(document)


@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3), documents(), st.data())
def test_the_schema_is_never_stricter_than_the_loader(
    extra: dict[str, Any], document: dict[str, Any], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from([document, document["scalers"][0], document["scalers"][0]["labelSets"][0]]))
    place.update(extra)
    if loads(document).config is not None:
        assert SCHEMA.is_valid(document)


@given(documents(), st.data())
def test_an_unknown_key_is_told_where_it_stands(document: dict[str, Any], data: st.DataObject) -> None:
    places = [document, *document["scalers"], *(each for one in document["scalers"] for each in one["labelSets"])]
    data.draw(st.sampled_from(places))["strange"] = 1
    text = yaml.safe_dump(document, sort_keys=data.draw(st.booleans()), default_flow_style=data.draw(st.booleans()))
    (problem,) = checked(load_text(text.encode())).problems
    line = text.splitlines()[problem.line - 1]
    assert line[problem.column - 1 :].startswith("strange")


@given(documents(), st.integers(0, 4))
@settings(max_examples=30, deadline=None)
def test_it_does_not_matter_in_how_many_files_the_scalers_are(document: dict[str, Any], cut: int) -> None:
    scalers = document["scalers"]
    assume(cut < len(scalers))
    with TemporaryDirectory() as folder:
        main, directory = Path(folder, "scalers.yaml"), Path(folder, "scalers.d")
        directory.mkdir()
        main.write_text(json.dumps({"version": 1, "scalers": scalers[:cut]}))
        for number, entry in enumerate(scalers[cut:]):
            (directory / f"{number:02}.yaml").write_text(json.dumps({"scalers": [entry]}))
        assert load_scalers(main, directory).config == loads(document).config


NAMED = st.dictionaries(
    st.sampled_from(sorted(known_names())) | st.text(max_size=8).map(lambda text: f"KICI_{text}"),
    st.text(max_size=12) | st.sampled_from(["0", "1", "60000", "true", "none", "0.0.0.0", "ws://h/ws"]),
    max_size=8,
)


@given(
    NAMED,
    st.dictionaries(st.sampled_from(["port", "host", "data_dir", "dev"]), st.none() | st.text(max_size=6), max_size=2),
)
def test_no_environment_crashes_it(environ: dict[str, str], flags: dict[str, object]) -> None:
    try:
        read = read_settings({"HOME": "/home/ci"} | environ, **flags)
    except SettingsRefused as refused:
        told = [str(problem) for problem in refused.problems]
    else:
        told = ["fine"]
        assert read.scaler_provision_backoff_max_ms >= read.scaler_provision_backoff_base_ms
    assert told
    assert all("\n" not in line for line in told)
