"""A job's own image on its way to a backend."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kici.domain.errors import JobRefused, NotFound, StoreDown
from kici.domain.ids import OrgId
from kici.domain.job import Job
from kici.domain.secret import SecretRef
from kici.services.container_spawn import ContainerSpawn
from kici.testing.builders import a_job


class Secrets:
    """Those that are given; asked for others it says which one is missing."""

    def __init__(self, **values: str) -> None:
        self._values = {SecretRef("registry", key): value for key, value in values.items()}
        self.is_down = False

    async def resolve(self, org: OrgId, refs: Iterable[SecretRef]) -> dict[SecretRef, str]:
        if self.is_down:
            raise StoreDown("the store does not answer")
        for ref in refs:
            if ref not in self._values:
                raise NotFound(f"there is no secret {ref.context}:{ref.key}")
        return {ref: self._values[ref] for ref in refs}


def in_image(**registry: str) -> Job:
    job = a_job()
    return replace(job, spec=replace(job.spec, image="ghcr.io/a/b:1", registry=registry))


@pytest.mark.spec("scaler 28.4.3")
async def test_a_secret_that_is_not_there_ends_the_job_with_its_reference() -> None:
    spawn = ContainerSpawn(secrets=Secrets(user="ci", other="hunter2"))
    with pytest.raises(JobRefused, match="registry:token") as caught:
        await spawn.resolve(in_image(username="registry:user", password="registry:token"), in_image=True)
    assert "ghcr.io" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "ci" not in str(caught.value).replace("ghcr.io", "").split()


async def test_references_become_values_for_the_spawn_only() -> None:
    spawn = ContainerSpawn(secrets=Secrets(user="ci", token="hunter2"))
    found = await spawn.resolve(in_image(username="registry:user", password="registry:token"), in_image=True)
    assert found is not None
    assert (found.username, found.password, found.registry) == ("ci", "hunter2", "ghcr.io")
    assert "hunter2" not in repr(found)


async def test_a_store_that_is_away_does_not_end_the_job() -> None:
    secrets = Secrets(token="hunter2")
    secrets.is_down = True
    with pytest.raises(StoreDown):
        await ContainerSpawn(secrets=secrets).resolve(in_image(password="registry:token"), in_image=True)


@pytest.mark.spec("scaler 28.4.5")
@pytest.mark.parametrize("is_in_image", [True, False])
async def test_an_image_that_is_to_be_built_is_an_ordinary_agents(is_in_image: bool) -> None:
    """No credentials are looked up for it here: there is nothing to pull yet."""
    job = a_job()
    registry = {"password": "registry:token", "registry": "ghcr.io"}
    job = replace(job, spec=replace(job.spec, image="dockerfile:D", registry=registry))
    assert await ContainerSpawn(secrets=Secrets()).resolve(job, in_image=is_in_image) is None


@pytest.mark.spec("scaler 18.7")
async def test_a_scaler_of_processes_makes_an_ordinary_agent_for_an_image() -> None:
    job = in_image(password="registry:token")
    assert await ContainerSpawn(secrets=Secrets()).resolve(job, in_image=False) is None
