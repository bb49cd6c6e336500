"""The agent's own log: a line on standard error for each event, plain on a terminal, JSON for whoever collects it."""

import sys
from datetime import UTC, datetime
from typing import Final

import msgspec

_encode: Final = msgspec.json.encode


class Notes:
    """`agent_id` may change once: when a claim code was redeemed."""

    def __init__(self, agent_id: str) -> None:
        self.agent_id = agent_id
        self._is_terminal = sys.stderr.isatty()

    def info(self, event: str, text: str = "", **fields: object) -> None:
        self._write("info", event, text, fields)

    def warning(self, event: str, text: str = "", **fields: object) -> None:
        self._write("warn", event, text, fields)

    def error(self, event: str, text: str = "", **fields: object) -> None:
        self._write("error", event, text, fields)

    def _write(self, level: str, event: str, text: str, fields: dict[str, object]) -> None:
        now = datetime.now(UTC)
        if self._is_terminal:
            rest = "".join(f" {name}={value}" for name, value in fields.items())
            line = f"{now.astimezone():%H:%M:%S} {event}{': ' if text else ''}{text}{rest}\n"
        else:
            head = {"time": now.isoformat(timespec="milliseconds"), "level": level, "message": event}
            body = {"agent_id": self.agent_id, **({"text": text} if text else {}), **fields}
            line = _encode({**head, **body}).decode() + "\n"
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except OSError:
            pass  # nobody reads any more
