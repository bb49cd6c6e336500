"""What holds for every test: engines are skipped with a reason, required, and listed at the end."""

import os
import signal
from collections import Counter

import pytest

from kici.testing import engines


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup children would inherit that, and some tests are about what HUP does to them.
        signal.signal(signal.SIGHUP, lambda *_: None)
    faults = engines.missing(os.environ.get(engines.REQUIRE_ENGINES, ""))
    if faults:
        raise pytest.UsageError("\n".join(faults))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in (name for marker in item.iter_markers("engine") for name in marker.args):
        item.user_properties.append(("engine", name))
        reason = engines.absence(name)
        if reason is not None:
            pytest.skip(f"engine {name}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = Counter(
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
        for name, value in report.user_properties
        if name == "engine"
    )
    terminalreporter.section("engines")
    for name in engines.ENGINES:
        what = f"{ran[name]} tests" if ran[name] else f"not exercised ({engines.absence(name) or 'no test of it ran'})"
        terminalreporter.write_line(f"{name}: {what}")
