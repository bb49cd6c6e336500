"""Records about an agent say which job it works for."""

import io
import json
import logging
from collections.abc import Iterator, Mapping

import pytest

from kici.observe.attribution import Attribution
from kici.observe.logging_setup import JsonFormatter


class Log:
    """A logger of its own, as the program sets it up."""

    def __init__(self) -> None:
        self.works: dict[str, Mapping[str, str]] = {}
        self._out = io.StringIO()
        self._handler = logging.StreamHandler(self._out)
        self._handler.setFormatter(JsonFormatter())
        self._handler.addFilter(Attribution(lambda agent_id: self.works.get(agent_id, {})))
        self._logger = logging.getLogger("kici.test.attribution")
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self._handler)

    def close(self) -> None:
        self._logger.removeHandler(self._handler)

    def says(self, **facts: object) -> dict[str, object]:
        """What was written for such a record, as far as it is about agents and jobs."""
        self._out.seek(0)
        self._out.truncate()
        self._logger.info("vm.console", extra={"kici": facts})
        written = json.loads(self._out.getvalue())
        return {name: written[name] for name in ("agent_id", "job_id", "run_id") if name in written}


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.close()


@pytest.mark.spec("scaler 39.4.7")
def test_once_an_agent_has_its_job_every_record_about_it_says_so(log: Log) -> None:
    assert log.says(agent_id="a", line="it boots") == {"agent_id": "a"}
    log.works["a"] = {"job_id": "job-1", "run_id": "run-1"}
    assert log.says(agent_id="a", line="it works") == {"agent_id": "a", "job_id": "job-1", "run_id": "run-1"}


def test_what_a_record_says_itself_stands(log: Log) -> None:
    log.works["a"] = {"job_id": "job-1", "run_id": "run-1"}
    assert log.says(agent_id="a", job_id="job-2") == {"agent_id": "a", "job_id": "job-2", "run_id": "run-1"}
    assert log.says(agent_id="a", job_id=None)["job_id"] == "job-1"


def test_records_about_nobody_are_left_alone(log: Log) -> None:
    assert log.says(line="x") == {}
    assert log.says(agent_id=7) == {"agent_id": 7}
