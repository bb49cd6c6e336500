"""How log records are written: one JSON object or one plain line each, on standard error.

Only the standard library: every command starts faster for it.  The message of a record is the event's name; its
facts come from `observe.events.emit` or from `extra=`.  Whatever they contain, a record stays one line.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO


class LogFormat(StrEnum):
    JSON = "json"
    PLAIN = "plain"


_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "kici"}
_RESERVED: Final = frozenset({"time", "level", "event", "logger", "error"})
_NOISY: Final = ("asyncio", "aiohttp.access")
_VALUE_MAX: Final = 2000


def set_up_logging(
    *, log_format: LogFormat = LogFormat.PLAIN, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Send all records of this process to `stream` (standard error).  Calling it again replaces the set-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else PlainFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, event, logger, the facts, and `error` with the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        for name, value in facts_of(record).items():
            line[f"{name}_" if name in _RESERVED else name] = _jsonable(value)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str)


class PlainFormatter(logging.Formatter):
    """For people: time, level, event, `name=value` for each fact; a traceback follows in indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        facts = [f"{name}={_plain(value)}" for name, value in facts_of(record).items()]
        line = " ".join([_time(record), f"{record.levelname:<7}", _escaped(record.getMessage()), *facts])
        if record.exc_info:
            line += "\n" + "\n".join(f"    {row}" for row in self.formatException(record.exc_info).splitlines())
        return line


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    """What was said besides the event's name, in the order in which it was said."""
    facts: dict[str, object] = dict(getattr(record, "kici", {}))
    facts |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return facts


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _jsonable(value: object) -> object:
    match value:
        case bool() | int() | float() | None:
            return value
        case str():
            return value[:_VALUE_MAX]
        case frozenset() | set():
            return sorted(str(item) for item in value)
        case list() | tuple():
            return [_jsonable(item) for item in value]
        case _:
            return str(value)[:_VALUE_MAX]


def _plain(value: object) -> str:
    shown = _jsonable(value)
    text = ",".join(str(item) for item in shown) if isinstance(shown, list) else str(shown)
    needs_quotes = not text or any(character in ' "=\\' or not character.isprintable() for character in text)
    return json.dumps(text, ensure_ascii=True) if needs_quotes else text


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
