import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kici.observe.events import Event, emit
from kici.observe.logging_setup import LogFormat, set_up_logging


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(log_format: LogFormat, *, level: int = logging.INFO) -> io.StringIO:
    stream = io.StringIO()
    set_up_logging(log_format=log_format, level=level, stream=stream)
    return stream


def only(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    parsed = json.loads(line)
    assert isinstance(parsed, dict)
    return parsed


def test_json_has_the_event_and_its_facts() -> None:
    stream = lines(LogFormat.JSON)
    emit(Event.JOB_DISPATCHED, job_id="job-1", labels=frozenset({"b", "a"}), attempt=2)
    line = only(stream)
    assert line["event"] == "job.dispatched"
    assert line["level"] == "info"
    assert (line["job_id"], line["labels"], line["attempt"]) == ("job-1", ["a", "b"], 2)
    assert line["time"].endswith("Z")


def test_facts_of_other_loggers_are_shown_as_well() -> None:
    stream = lines(LogFormat.JSON)
    logging.getLogger("kici.kit.supervise").warning("service.failed", extra={"service": "reaper", "seconds": 0.1})
    assert only(stream)["service"] == "reaper"


def test_a_fact_cannot_take_the_place_of_what_every_line_has() -> None:
    stream = lines(LogFormat.JSON)
    emit(Event.JOB_FINISHED, time="never", error="none")
    line = only(stream)
    assert line["time"] != "never"
    assert (line["time_"], line["error_"], line["event"]) == ("never", "none", "job.finished")
    assert "error" not in line


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_whatever_it_contains_a_record_stays_one_line(log_format: LogFormat) -> None:
    stream = lines(log_format)
    emit(Event.AGENT_REFUSED, reason='x\nagent.registered agent_id="evil"\r\n\x1b[31m', agent_id="a b")
    logging.getLogger("other").warning("one\ntwo")
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_read_as_name_and_value() -> None:
    stream = lines(LogFormat.PLAIN)
    emit(Event.JOB_FINISHED, job_id="job-1", reason="no such file", codes=[1, 2], empty="")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('INFO    job.finished job_id=job-1 reason="no such file" codes=1,2 empty=""')


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_errors_carry_their_traceback(log_format: LogFormat) -> None:
    stream = lines(log_format)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("kici").exception("task.failed", extra={"task": "t"})
    first, *rest = stream.getvalue().splitlines()
    if log_format is LogFormat.JSON:
        assert "ValueError: boom" in json.loads(first)["error"]
        assert not rest
    else:
        assert first.endswith("task=t")
        assert "ValueError: boom" in rest[-1]
        assert all(line.startswith("    ") for line in rest)


def test_levels_are_respected_and_chatter_of_libraries_is_not_shown() -> None:
    stream = lines(LogFormat.PLAIN)
    logging.getLogger("kici").debug("detail")
    logging.getLogger("aiohttp.access").info("GET /")
    assert stream.getvalue() == ""


def test_setting_up_twice_does_not_double_the_lines() -> None:
    lines(LogFormat.PLAIN)
    stream = lines(LogFormat.PLAIN)
    emit(Event.JOB_STARTED)
    assert len(stream.getvalue().splitlines()) == 1


def test_long_values_are_cut() -> None:
    stream = lines(LogFormat.JSON)
    emit(Event.JOB_FINISHED, reason="x" * 100_000)
    assert len(stream.getvalue()) < 5000


def test_it_needs_only_the_standard_library() -> None:
    program = (
        "import sys, kici.observe.logging_setup; "
        "sys.exit(any(name in sys.modules for name in ('asyncio', 'msgspec', 'prometheus_client', 'structlog')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0
