"""Types of option values."""

import re
from typing import Final

import click

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?\Z")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


class Duration(click.ParamType[float]):
    """Seconds, or a number with a unit: `90`, `1.5h`, `30m`."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.match(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration; give seconds, or a number with ms, s, m, h or d", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


class Pair(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "pair"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, sign, text = value.partition("=")
        if not sign or not key:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return key, text


DURATION: Final = Duration()
PAIR: Final = Pair()
