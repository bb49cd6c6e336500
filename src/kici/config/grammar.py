"""Small grammars of configuration values: text in, value out.

Each function raises `ValueError` whose message is a hint for the reader of the file (it may be empty); what was
expected is said by the kind that uses the function.  None of them looks at the machine.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Final
from urllib.parse import urlsplit

from kici.domain.ids import ScalerName
from kici.domain.labels import RESERVED_PREFIX, is_reserved
from kici.domain.resources import parse_memory

NAME_CHARS_MAX: Final = 128
LABEL_CHARS_MAX: Final = 256
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_POOL: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\Z")
_INTERFACE: Final = re.compile(r"[A-Za-z0-9._-]{1,15}\Z")
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_HOST_NAME: Final = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\Z"
)
_VOLUME: Final = re.compile(r"[^\x00]+?:/[^:\x00]*(:[A-Za-z,]+)?\Z")
_DIGITS: Final = re.compile(r"[0-9]{1,5}\Z")
_BATCH: Final = re.compile(r"\.(cmd|bat)\Z", re.IGNORECASE)
_SYNTAX_ALWAYS: Final = re.compile(r'["%^\x00-\x1f]')
_SYNTAX_UNQUOTED: Final = re.compile(r"[&|<>(),;=]")
HOST_GATEWAY: Final = "host-gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccess:
    """One thing that agents may reach on the host itself."""

    network: IPv4Network | None
    """Addresses of the host; None: any of them."""
    port: int | None
    """TCP and UDP port; None: every port."""

    def __str__(self) -> str:
        where = "*" if self.network is None else str(self.network).removesuffix("/32")
        return f"{where}:{'*' if self.port is None else self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraHost:
    """One more name that agents can resolve."""

    name: str
    address: str
    """An IPv4 or IPv6 address, or `host-gateway`: the host as agents see it."""
    plain: bool = True
    """Written as `name:address`, the one form that microVMs understand too."""

    def __str__(self) -> str:
        return f"{self.name}:{self.address}"


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    if _CONTROL.search(value):
        raise ValueError("it contains a control character")
    return value


def scaler_name(value: str) -> ScalerName:
    """Names travel in labels, which travel in comma-separated lists."""
    text(value)
    if value != value.strip() or "," in value or len(value) > NAME_CHARS_MAX:
        raise ValueError(f"no comma, no blank at either end, at most {NAME_CHARS_MAX} characters")
    return ScalerName(value)


def label(value: str) -> str:
    if is_reserved(value):
        raise ValueError(f"labels that start with {RESERVED_PREFIX} are given by the orchestrator; choose another name")
    text(value)
    if "," in value or len(value) > LABEL_CHARS_MAX:
        raise ValueError(f"no comma, at most {LABEL_CHARS_MAX} characters")
    return value.strip().lower()


def pool_name(value: str) -> str:
    if not _POOL.match(value):
        raise ValueError("the name is also a file name: letters, digits, '.', '_' and '-', at most 64 of them")
    return value


def memory_text(value: str) -> str:
    """The text as written: layers are resolved later, but a bad string is found now."""
    memory_bytes(value)
    return value


def memory_bytes(value: str) -> int:
    try:
        size = parse_memory(value)
    except ValueError:
        raise ValueError(_memory_hint(value)) from None
    if size <= 0:
        raise ValueError("it must be more than nothing")
    return size


def _memory_hint(value: str) -> str:
    if value.strip().isdecimal():
        return f'add a unit: "{value.strip()}m" is MiB'
    trimmed = value.strip().rstrip("Bb")
    try:
        parse_memory(trimmed)
    except ValueError:
        return ""
    return f'did you mean "{trimmed}"?'


def image(value: str) -> str:
    text(value)
    if re.search(r"\s", value):
        raise ValueError("an image reference has no blanks")
    return value


def volume(value: str) -> str:
    if not _VOLUME.match(value):
        raise ValueError("for example /srv/cache:/cache:ro")
    return value


def variable_name(value: str) -> str:
    if not value or "=" in value or "\x00" in value:
        raise ValueError("a variable name is not empty and has no '='")
    return value


def variable_value(value: str) -> str:
    if "\x00" in value:
        raise ValueError("it contains a NUL character")
    return value


def network(value: str) -> IPv4Network:
    """CIDR of an IPv4 network; a bare address is a network of one."""
    try:
        return IPv4Network(value)
    except ValueError:
        pass
    try:
        meant = IPv4Network(value, strict=False)
    except ValueError:
        raise ValueError("agents' networks are IPv4; write it like 10.0.0.0/24") from None
    raise ValueError(f"it has host bits set; did you mean {meant}?")


def address(value: str) -> IPv4Address:
    try:
        return IPv4Address(value)
    except ValueError:
        raise ValueError("write it like 10.0.0.1") from None


def netmask(value: str) -> IPv4Address:
    mask = address(value)
    inverse = int(mask) ^ 0xFFFFFFFF
    if inverse & (inverse + 1):
        raise ValueError("the ones of a mask are all on the left, as in 255.255.255.0")
    return mask


def interface(value: str) -> str:
    if not _INTERFACE.match(value) or value in {".", ".."}:
        raise ValueError("letters, digits, '.', '_' and '-', at most 15 of them")
    return value


def nft_table(value: str) -> str:
    if not _TABLE.match(value):
        raise ValueError("letters, digits and '_', not starting with a digit")
    return value


def host_access(value: str) -> HostAccess:
    """`<port>`, `<address | network | *>` or `<address | network | *>:<port | *>`."""
    if _DIGITS.match(value):
        return HostAccess(network=None, port=_port(value))
    where, colon, port = value.partition(":")
    if re.search(r"[A-Za-z]", where):
        raise ValueError("host names are not looked up; name the address")
    found = None if where == "*" else network(where)
    return HostAccess(network=found, port=None if not colon or port == "*" else _port(port))


def _port(value: str) -> int:
    if not _DIGITS.match(value) or not 1 <= int(value) <= 65535:
        raise ValueError("ports are 1 to 65535")
    return int(value)


def extra_host(value: str) -> ExtraHost:
    """`name:address`; engines also know `name=address` and brackets around an IPv6 address."""
    parts = re.match(r"([^:=]*)([:=])(.*)\Z", value, re.DOTALL)
    if parts is None:
        raise ValueError("for example db.internal:10.0.0.5")
    name, sign, where = parts[1], parts[2], parts[3]
    if not _HOST_NAME.match(name):
        raise ValueError(f"{name!r} is not a host name")
    bare = where[1:-1] if where.startswith("[") and where.endswith("]") else where
    if bare != HOST_GATEWAY:
        try:
            bare = str(ip_address(bare))
        except ValueError:
            raise ValueError(f"{where!r} is neither an address nor {HOST_GATEWAY}") from None
    return ExtraHost(name=name, address=bare, plain=sign == ":" and not where.startswith("["))


def websocket_url(value: str) -> str:
    split = _url(value)
    if split[0] in {"http", "https"}:
        raise ValueError(f"agents connect by WebSocket: {value.replace('http', 'ws', 1)}")
    if split[0] not in {"ws", "wss"}:
        raise ValueError("it starts with ws:// or wss://")
    return value


def engine_url(value: str) -> str:
    split = _url(value)
    if split[0] == "unix":
        raise ValueError("name a local socket by socketPath instead")
    if split[0] not in {"tcp", "http", "https"}:
        raise ValueError("it starts with tcp://, http:// or https://")
    return value


def batch_syntax(path: str) -> str | None:
    """What `cmd.exe` would read as syntax in the path of a batch file; None: nothing, or no batch file.

    A path with a blank is quoted, which disarms all but a few.
    """
    if not _BATCH.search(path):
        return None
    found = _SYNTAX_ALWAYS.search(path) or (None if " " in path else _SYNTAX_UNQUOTED.search(path))
    return None if found is None else found[0]


def _url(value: str) -> tuple[str, str]:
    """Scheme and host name."""
    try:
        split = urlsplit(value)
        host, _ = split.hostname, split.port
    except ValueError as error:
        raise ValueError(str(error)) from None
    if "://" not in value or re.search(r"\s", value):
        raise ValueError("a URL has a scheme, '://' and no blanks")
    if not host and split.scheme != "unix":
        raise ValueError("the host name is missing")
    return split.scheme, host or ""
