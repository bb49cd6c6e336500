"""Documents of any shape: read or refused with paths, never anything else."""

import json
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kici.domain.document import SubmitRun, read_job, read_run
from kici.domain.document_rules import find_circle
from kici.domain.strict import Fault, Faulty
from kici.web.problems import ProblemError
from kici.web.routing import decode

KEYS = st.sampled_from(
    [
        *("name", "runsOn", "run", "command", "env", "resources", "container", "timeoutSeconds", "secrets", "org"),
        *("queueTimeoutSeconds", "labels", "exclude", "requests", "limits", "cpus", "memory", "image", "dockerfile"),
        *("credentials", "password", "username", "registry", "jobs", "needs", "a", "b"),
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["linux", "a:b", "1g", "a", "kici:os:linux"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=8)
GOOD_FIELDS = {
    "name": st.text("abc -", min_size=1, max_size=9).filter(str.strip),
    "runsOn": st.lists(st.sampled_from(["linux", "x64", "GPU", "kici:os:linux"]), max_size=3)
    | st.fixed_dictionaries({"labels": st.lists(st.sampled_from(["a", "b"])), "exclude": st.just(["c"])}),
    "env": st.dictionaries(st.sampled_from(["A", "B_1"]), st.text(max_size=5).filter(lambda text: "\0" not in text)),
    "resources": st.sampled_from(
        [{}, {"cpus": 2}, {"memory": "1g"}, {"requests": {"cpus": 1}, "limits": {"cpus": 1.5}}]
    ),
    "container": st.sampled_from(["alpine", {"image": "a/b:1"}, {"dockerfile": "Dockerfile"}]),
    "timeoutSeconds": st.floats(0.001, 1e6) | st.integers(1, 10**6),
    "queueTimeoutSeconds": st.floats(0, 1e6),
    "secrets": st.dictionaries(st.sampled_from(["S", "T"]), st.sampled_from(["c:k", "deploy:token"])),
}
WHAT = st.sampled_from([{"run": "make"}, {"command": ["make", "-j"]}])


def outcome(reader: Callable[[object], SubmitRun], raw: object) -> tuple[SubmitRun | None, tuple[Fault, ...]]:
    try:
        return reader(raw), ()
    except Faulty as error:
        return None, error.faults


@given(DOCUMENTS | VALUES)
def test_any_document_is_read_or_refused_with_paths(raw: object) -> None:
    for reader in (read_job, read_run):
        submitted, faults = outcome(reader, raw)
        if submitted is None:
            assert faults
            assert all(fault.path.startswith("$") and fault.message for fault in faults)
        else:
            assert submitted.jobs


@given(WHAT, st.fixed_dictionaries({}, optional=GOOD_FIELDS))
def test_good_parts_make_a_good_document(what: dict[str, object], parts: dict[str, object]) -> None:
    (job,) = read_job({**what, **parts}).jobs
    assert job.spec.command[-1] in ("make", "-j")
    assert all(label == label.strip().lower() for label in job.demand.labels)


@given(WHAT, st.fixed_dictionaries({}, optional=GOOD_FIELDS), KEYS, st.integers() | st.none() | st.just([[]]))
def test_one_bad_value_is_named_by_its_path(
    what: dict[str, object], parts: dict[str, object], key: str, value: object
) -> None:
    """A wrong type (or an unknown key) is reported at its own place, and nothing else becomes wrong by it."""
    is_allowed = value is None and key in {
        "name",
        "runsOn",
        "resources",
        "container",
        "timeoutSeconds",
        "queueTimeoutSeconds",
    }
    is_number = isinstance(value, int) and key in {"timeoutSeconds", "queueTimeoutSeconds"}
    if is_allowed or is_number or key in what or key in {"run", "command", "jobs", "needs"}:
        return
    submitted, faults = outcome(read_job, {**what, **parts, key: value})
    assert submitted is None
    assert {fault.path.split("[")[0] for fault in faults} == {f"$.{key}"}


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), max_size=3), max_size=6))
def test_a_circle_is_reported_exactly_when_there_is_no_order(needs: dict[str, list[str]]) -> None:
    closed = {key: [name for name in names if name in needs] for key, names in needs.items()}
    circle = find_circle(closed)
    if circle:
        assert all(after in closed[before] for before, after in zip(circle, circle[1:] + circle[:1], strict=True))
    else:
        done: set[str] = set()
        while len(done) < len(closed):
            ready = {key for key, names in closed.items() if key not in done and done.issuperset(names)}
            assert ready
            done |= ready


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_decoded_or_refused(body: bytes) -> None:
    try:
        decode(body)
    except (ProblemError, Faulty):
        return
    json.loads(body)
