"""The pages of the health port."""

import json

import pytest

from kici.agent.health import Facts, page

FACTS = Facts(agent_id="a", version="1", connected=True, active_jobs=1, jobs_total=2, output_bytes=3)
LOST = Facts(agent_id="a", version="1", connected=False, active_jobs=0, jobs_total=0, output_bytes=0)


@pytest.mark.parametrize(
    ("path", "facts", "status"),
    [
        ("/health", FACTS, 200),
        ("/health", LOST, 200),
        ("/ready", FACTS, 200),
        ("/ready", LOST, 503),
        ("/metrics", LOST, 200),
        ("/", FACTS, 404),
        ("", FACTS, 404),
    ],
)
def test_health_is_always_well_and_ready_is_connected(path: str, facts: Facts, status: int) -> None:
    assert page(path, facts)[0] == status


def test_pages_say_what_the_agent_does() -> None:
    assert json.loads(page("/health", FACTS)[2]) == {
        "agentId": "a",
        "version": "1",
        "connected": True,
        "activeJobs": 1,
        "jobsTotal": 2,
        "outputBytes": 3,
    }
    assert b"kici_agent_jobs_total 2\n" in page("/metrics", FACTS)[2]
    assert b"kici_agent_log_bytes_total 3\n" in page("/metrics", FACTS)[2]
