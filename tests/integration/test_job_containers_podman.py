"""The same jobs in containers that their agents make, on a Podman."""

from collections.abc import Iterator

import pytest
from tests.docker_engine import Lab
from tests.integration.docker_lab import BUSYBOX, DEBIAN, USER, import_images
from tests.integration.test_job_containers import (
    test_a_job_is_asked_to_end_and_then_made_to,
    test_a_job_runs_in_its_image_and_nothing_is_left,
    test_a_job_that_runs_too_long_is_ended,
    test_an_image_is_built_and_used,
    test_an_instruction_that_fails_is_the_reason,
    test_no_container_outlives_its_agent,
    test_output_is_byte_exact_however_much,
    test_what_a_job_is_told_is_nowhere_to_be_read,
)
from tests.podman_engine import podman_lab

__all__ = [
    "test_a_job_is_asked_to_end_and_then_made_to",
    "test_a_job_runs_in_its_image_and_nothing_is_left",
    "test_a_job_that_runs_too_long_is_ended",
    "test_an_image_is_built_and_used",
    "test_an_instruction_that_fails_is_the_reason",
    "test_no_container_outlives_its_agent",
    "test_output_is_byte_exact_however_much",
    "test_what_a_job_is_told_is_nowhere_to_be_read",
]
pytestmark = [pytest.mark.engine("podman"), pytest.mark.xdist_group("job-containers-podman"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with podman_lab() as running:
        import_images(running)
        for image in (BUSYBOX, DEBIAN, USER):  # it imports everything as `latest`
            name, _, tag = image.rpartition(":")
            running.ask("POST", f"/images/{name}:latest/tag?repo={name}&tag={tag}")
        yield running
