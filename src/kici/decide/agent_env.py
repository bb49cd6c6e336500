"""The environment of an agent process on the coordinator's own host.

Four layers, later ones win: what the host's programs need (or, in trusted mode, everything that is no secret),
what the operator forwards to agents, what we tell the agent, what the label set says.  Nothing else of the
coordinator's own environment gets through: it holds the credentials of the whole installation.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

FORWARD_PREFIX: Final = "KICI_AGENT_ENV_"
TRUSTED: Final = "KICI_TRUSTED_ENV"

_POSIX_SYSTEM: Final = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TMPDIR", "TZ"}
)
_WINDOWS_SYSTEM: Final = frozenset(
    {
        *{"PATH", "PATHEXT", "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "TEMP", "TMP", "OS", "LANG", "TZ"},
        *{"USERPROFILE", "USERNAME", "USERDOMAIN", "HOMEDRIVE", "HOMEPATH", "APPDATA", "LOCALAPPDATA"},
        *{"PROGRAMDATA", "PROGRAMFILES", "PROGRAMFILES(X86)", "PROGRAMW6432", "COMMONPROGRAMFILES"},
        *{"NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE"},
    }
)
_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH_?KEY|SIGNING|COOKIE|_DSN\Z|_PAT\Z"
    r"|\AKICI_|DATABASE_URL|\APGPASS|\APGSERVICE|\ANOTIFY_SOCKET\Z|\ALISTEN_|\AINVOCATION_ID\Z|\AJOURNAL_STREAM\Z",
    re.IGNORECASE,
)
_SECRET_VALUE: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)
"""A URL with a password in it, under whatever name."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """What the operator gives to agents: `KICI_AGENT_ENV_<NAME>` as `<NAME>`."""
    return {
        name.removeprefix(FORWARD_PREFIX): value
        for name, value in environment.items()
        if name.startswith(FORWARD_PREFIX) and name != FORWARD_PREFIX
    }


def is_secret(name: str, value: str) -> bool:
    """Whether trusted mode withholds a variable.  Names of ours count: they are the coordinator's settings."""
    return _SECRET_NAME.search(name) is not None or _SECRET_VALUE.search(value) is not None


def system_part(environment: Mapping[str, str], *, windows: bool) -> dict[str, str]:
    """The variables that any program of this host needs."""
    if windows:
        return {name: value for name, value in environment.items() if name.upper() in _WINDOWS_SYSTEM}
    return {name: value for name, value in environment.items() if name in _POSIX_SYSTEM}


def contract(
    *, agent_id: str, labels: Sequence[str], url: str, token: str | None, image: str | None, backpressure: str | None
) -> dict[str, str]:
    """What every agent of a scaler on this host is told."""
    told = {
        "KICI_ORCHESTRATOR_URL": url,
        "KICI_AGENT_ID": agent_id,
        "KICI_LABELS": ",".join(labels),
        "KICI_SCALER_MANAGED": "1",
        "KICI_EXECUTION_MODE": "bare-metal",
        "KICI_PORT": "0",
        "KICI_AGENT_TOKEN": token,
        "KICI_BACKPRESSURE_MODE": backpressure,
        "KICI_RUNTIME_IMAGE": image,
    }
    return {name: value for name, value in told.items() if value is not None}


def agent_environment(
    host: Mapping[str, str], *, told: Mapping[str, str], label_set: Mapping[str, str], windows: bool
) -> dict[str, str]:
    """The whole environment of an agent process."""
    given = forwarded(host)
    is_trusted = label_set.get(TRUSTED, given.get(TRUSTED)) == "true"
    base = (
        {name: value for name, value in host.items() if not is_secret(name, value)}
        if is_trusted
        else system_part(host, windows=windows)
    )
    return {**base, **given, **told, **label_set}
