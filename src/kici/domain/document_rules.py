"""Rules for the values of a job document: each appends what is wrong to `faults`, with the path of the value."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kici.domain.document_model import (
    TEXT_MAX,
    AskDocument,
    ContainerDocument,
    CredentialsDocument,
    JobFields,
    ResourcesDocument,
    SelectorDocument,
)
from kici.domain.ids import OrgId
from kici.domain.job import JobBuild
from kici.domain.labels import RESERVED_PREFIX, canonical, is_reserved
from kici.domain.resources import Ask, ResourceRequest, parse_memory
from kici.domain.secret import parse_secret_ref
from kici.domain.strict import Fault, nearest, unknown

LABELS_MAX: Final = 64
CPUS_MAX: Final = 256
REGISTRY_USER: Final = "x-access-token"
DOCKERFILE_PREFIX: Final = "dockerfile:"
LABEL_FAMILIES: Final = ("agent", "agent-feature", "arch", "host", "os", "privileged", "role", "runtime", "scaler")
"""Families of reserved labels that agents carry, so that jobs may select by them."""

CONTEXT_BYTES_MAX: Final = 256 * 1024
"""Files of a build, names included: they are stored with their job."""
_BUILD_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
_ORG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SPACE: Final = re.compile(r"\s")


def check_org(text: str, faults: list[Fault]) -> OrgId:
    if not _ORG.match(text):
        faults.append(Fault("$.org", "an organisation is 1 to 64 letters, digits, dots, underscores and hyphens"))
    return OrgId(text)


def check_line(text: str | None, path: str, faults: list[Fault]) -> None:
    if text is not None and (not text.strip() or CONTROL.search(text)):
        faults.append(Fault(path, "expected text of one line, without control characters"))


def read_command(document: JobFields, path: str, faults: list[Fault]) -> tuple[str, ...]:
    if (document.run is None) == (document.command is None):
        found = "neither" if document.run is None else "both"
        faults.append(Fault(path, f"expected one of run (a shell script) and command (a list), found {found}"))
        return ()
    if document.command is not None:
        if not document.command or not document.command[0]:
            faults.append(Fault(f"{path}.command", "expected a program and its arguments, found nothing to run"))
        faults.extend(_no_nul({f"{path}.command[{i}]": word for i, word in enumerate(document.command)}))
        return tuple(document.command)
    script = document.run or ""
    if not script.strip():
        faults.append(Fault(f"{path}.run", "expected a shell script, found nothing to run"))
    faults.extend(_no_nul({f"{path}.run": script}))
    return ("/bin/sh", "-e", "-c", script)


def _no_nul(texts: Mapping[str, str]) -> list[Fault]:
    return [Fault(path, "expected text without NUL characters") for path, text in texts.items() if "\0" in text]


def read_selector(
    runs_on: list[str] | SelectorDocument | None, path: str, faults: list[Fault]
) -> tuple[frozenset[str], frozenset[str]]:
    if runs_on is None:
        return frozenset(), frozenset()
    if isinstance(runs_on, list):
        return _labels(runs_on, path, faults), frozenset()
    labels = _labels(runs_on.labels, f"{path}.labels", faults)
    exclude = _labels(runs_on.exclude, f"{path}.exclude", faults)
    faults.extend(
        Fault(f"{path}.exclude", f"label {label!r} is both required and excluded: no agent could ever fit")
        for label in sorted(labels & exclude)
    )
    return labels, exclude


def _labels(labels: list[str], path: str, faults: list[Fault]) -> frozenset[str]:
    if len(labels) > LABELS_MAX:
        faults.append(Fault(path, f"expected at most {LABELS_MAX} labels, found {len(labels)}"))
    for index, label in enumerate(labels):
        problem = _label_problem(label.strip())
        if problem:
            faults.append(Fault(f"{path}[{index}]", problem))
    return frozenset(canonical(labels))


def _label_problem(label: str) -> str | None:
    if not label or len(label) > TEXT_MAX or "," in label or _SPACE.search(label) or CONTROL.search(label):
        return f"a label is 1 to {TEXT_MAX} characters without spaces and commas, found {label[:60]!r}"
    if not is_reserved(label):
        return None
    family, _, value = label[len(RESERVED_PREFIX) :].lower().partition(":")
    if family not in LABEL_FAMILIES:
        known = [f"{RESERVED_PREFIX}{each}" for each in LABEL_FAMILIES]
        return unknown(f"{RESERVED_PREFIX}{family}", known, what="family of reserved labels")
    return None if value else f"label {label!r} lacks a value: {RESERVED_PREFIX}{family}:<value>"


def read_resources(document: ResourcesDocument | None, path: str, faults: list[Fault]) -> ResourceRequest:
    if document is None:
        return ResourceRequest()
    flat = document.cpus is not None or document.memory is not None
    if flat and (document.requests is not None or document.limits is not None):
        faults.append(Fault(path, "expected either cpus and memory, or requests and limits, found both forms"))
        return ResourceRequest()
    if flat:
        ask = _ask(AskDocument(cpus=document.cpus, memory=document.memory), path, faults)
        return ResourceRequest(requests=ask, limits=ask)
    requests = _ask(document.requests, f"{path}.requests", faults)
    limits = _ask(document.limits, f"{path}.limits", faults)
    if requests.cpus is not None and limits.cpus is not None and requests.cpus > limits.cpus:
        message = f"requests {requests.cpus:g} cpus, which is more than the limit of {limits.cpus:g}"
        faults.append(Fault(f"{path}.requests.cpus", message))
    if requests.memory and limits.memory and parse_memory(requests.memory) > parse_memory(limits.memory):
        message = f"requests {requests.memory}, which is more than the limit of {limits.memory}"
        faults.append(Fault(f"{path}.requests.memory", message))
    return ResourceRequest(requests=requests, limits=limits)


def _ask(document: AskDocument | None, path: str, faults: list[Fault]) -> Ask:
    """What is wrong is reported, and left out of the answer."""
    if document is None:
        return Ask()
    cpus, memory = document.cpus, document.memory
    if cpus is not None and not 0 < cpus <= CPUS_MAX:
        faults.append(Fault(f"{path}.cpus", f"expected more than 0 and at most {CPUS_MAX} cpus, found {cpus:g}"))
        cpus = None
    if memory is not None:
        problem = _memory_problem(memory)
        if problem:
            faults.append(Fault(f"{path}.memory", problem))
            memory = None
    return Ask(cpus=cpus, memory=memory)


def _memory_problem(text: str) -> str | None:
    if len(text) > 40:
        return f"expected memory such as 512m, found {len(text)} characters"
    try:
        size = parse_memory(text)
    except ValueError as error:
        return str(error)
    return None if 0 < size < 2**60 else f"expected more than nothing and less than an exbibyte, found {text!r}"


def read_container(
    container: str | ContainerDocument | None, path: str, faults: list[Fault]
) -> tuple[str | None, dict[str, str]]:
    """The image (or `dockerfile:<path>`) and the references of its registry's credentials."""
    if container is None:
        return None, {}
    if isinstance(container, str):
        return _image(container, path, faults), {}
    if (container.image is None) == (container.dockerfile is None):
        found = "neither" if container.image is None else "both"
        faults.append(Fault(path, f"expected one of image and dockerfile, found {found}"))
        return None, {}
    registry = _credentials(container.credentials, f"{path}.credentials", faults)
    if container.image is not None:
        return _image(container.image, f"{path}.image", faults), registry
    dockerfile = container.dockerfile or ""
    if not is_inner_path(dockerfile):
        faults.append(Fault(f"{path}.dockerfile", "expected the path of a Dockerfile among the files of the build"))
    if container.credentials is not None and container.credentials.registry is None:
        message = "registry is missing: a Dockerfile has no image name that would tell which registry to log in to"
        faults.append(Fault(f"{path}.credentials", message))
    return f"{DOCKERFILE_PREFIX}{dockerfile}", registry


def read_build(container: str | ContainerDocument | None, path: str, faults: list[Fault]) -> JobBuild:
    """What a Dockerfile is built with."""
    if container is None or isinstance(container, str):
        return JobBuild()
    given = {"context": container.context, "target": container.target, "args": container.args}
    if container.dockerfile is None:
        faults += [Fault(f"{path}.{name}", "goes with dockerfile only") for name, value in given.items() if value]
        return JobBuild()
    faults += [
        Fault(f"{path}.context", f"expected paths below the work directory, such as src/app.py, found {name[:60]!r}")
        for name in container.context
        if not is_inner_path(name)
    ]
    size = sum(len(name.encode()) + len(text.encode()) for name, text in container.context.items())
    if size > CONTEXT_BYTES_MAX:
        told = f"expected at most {CONTEXT_BYTES_MAX} bytes of files, found {size}; copy the rest when the job runs"
        faults.append(Fault(f"{path}.context", told))
    if container.target is not None and not _BUILD_NAME.fullmatch(container.target):
        faults.append(Fault(f"{path}.target", f"expected the name of a stage, found {container.target[:60]!r}"))
    faults += [
        Fault(f"{path}.args", f"expected the names of build arguments, found {name[:60]!r}")
        for name in container.args
        if not _BUILD_NAME.fullmatch(name)
    ]
    return JobBuild(context=container.context, target=container.target, args=container.args)


def is_inner_path(name: str) -> bool:
    """Whether a path stays below where it starts, and is written in the one way that it can be."""
    parts = name.split("/")
    is_plain = len(name) <= 512 and not CONTROL.search(name) and name == name.strip()
    return is_plain and not any(part in ("", ".", "..") for part in parts)


def _image(image: str, path: str, faults: list[Fault]) -> str:
    bad = not image or len(image) > 512 or _SPACE.search(image) or CONTROL.search(image)
    if bad or image.startswith(("-", DOCKERFILE_PREFIX)):
        faults.append(Fault(path, f"expected the name of an image, found {image[:60]!r}"))
    return image


def _credentials(document: CredentialsDocument | None, path: str, faults: list[Fault]) -> dict[str, str]:
    if document is None:
        return {}
    _secret_ref(document.password, f"{path}.password", faults, literal_is="a password must not stand in a document")
    username = REGISTRY_USER if document.username is None else document.username
    if ":" in username:
        _secret_ref(username, f"{path}.username", faults)
    else:
        check_line(username, f"{path}.username", faults)
    answer = {"username": username, "password": document.password}
    if document.registry is not None:
        if not document.registry or _SPACE.search(document.registry) or CONTROL.search(document.registry):
            faults.append(Fault(f"{path}.registry", "expected the host of a registry, such as ghcr.io"))
        answer["registry"] = document.registry
    return answer


def _secret_ref(text: str, path: str, faults: list[Fault], *, literal_is: str = "") -> None:
    """The value is never repeated in the message: it may be the secret itself, put there by mistake."""
    try:
        parse_secret_ref(text)
    except ValueError:
        why = f"; {literal_is}: store it with `kici-admin secrets set`" if literal_is else ""
        faults.append(Fault(path, f"expected a reference <context>:<key> to a stored secret{why}"))


def check_environment(document: JobFields, path: str, faults: list[Fault]) -> None:
    for where, names in (("env", document.env), ("secrets", document.secrets)):
        faults.extend(
            Fault(f"{path}.{where}", f"{name[:60]!r} is no name of an environment variable")
            for name in names
            if not _ENV_NAME.match(name)
        )
    faults.extend(_no_nul({f"{path}.env.{name}": value for name, value in document.env.items()}))
    for name, ref in document.secrets.items():
        _secret_ref(ref, f"{path}.secrets.{name[:60]}", faults)
    faults.extend(
        Fault(f"{path}.secrets.{name}", "is also set in env; a job sees one value only")
        for name in sorted(document.env.keys() & document.secrets.keys())
    )


def check_needs(needs: Mapping[str, list[str]], known: Iterable[str], faults: list[Fault]) -> None:
    """`known`: the ids of all jobs, the unreadable ones too."""
    ids = set(known)
    for key, names in needs.items():
        for index, name in enumerate(names):
            if name not in ids:
                guess = nearest(name, ids)
                hint = f"; did you mean {guess}?" if guess else ""
                faults.append(Fault(f"$.jobs.{key}.needs[{index}]", f"no job {name[:100]!r} in this file{hint}"))
    circle = find_circle({key: [name for name in names if name in needs] for key, names in needs.items()})
    if circle:
        message = f"jobs need each other in a circle: {' -> '.join([*circle, circle[0]])}"
        faults.append(Fault(f"$.jobs.{circle[0]}.needs", message))


def find_circle(needs: Mapping[str, Iterable[str]]) -> list[str]:
    """Jobs that wait for each other, in order of need; empty when there are none.  Every need must be a key."""
    left = {key: set(names) for key, names in needs.items()}
    dependents: dict[str, list[str]] = {key: [] for key in left}
    for key, names in left.items():
        for name in names:
            dependents[name].append(key)
    free = [key for key, names in left.items() if not names]
    while free:
        done = free.pop()
        del left[done]
        for key in dependents[done]:
            left[key].discard(done)
            if not left[key]:
                free.append(key)
    trail: list[str] = []
    at = min(left, default="")
    while at and at not in trail:
        trail.append(at)
        at = min(left[at])
    return trail[trail.index(at) :] if at else []
