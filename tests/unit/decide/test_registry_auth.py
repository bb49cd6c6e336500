"""A job's container: three answers, and what its log-in refers to."""

import pytest

from kici.decide.registry_auth import BuiltContainer, ImageContainer, LogIn, NoContainer, container_of
from kici.domain.container import registry_of
from kici.domain.secret import SecretRef


@pytest.mark.spec("scaler 28.4.1")
@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("ghcr.io/a/b:1", "ghcr.io"),
        ("localhost:5000/x", "localhost:5000"),
        ("alpine", "docker.io"),
        ("library/alpine", "docker.io"),
    ],
)
def test_the_registry_of_an_image(image: str, registry: str) -> None:
    assert registry_of(image) == registry


def test_the_three_answers_are_kept_apart() -> None:
    assert container_of(None, {}) == NoContainer()
    assert container_of("alpine", {}) == ImageContainer(image="alpine")
    assert container_of("dockerfile:D", {}) == BuiltContainer(dockerfile="D")


@pytest.mark.spec("scaler 28.4.4")
def test_a_log_in_without_a_user_name() -> None:
    found = container_of("ghcr.io/a", {"password": "r:p"})
    assert found == ImageContainer(
        image="ghcr.io/a", log_in=LogIn(server="ghcr.io", password=SecretRef("r", "p"), username="x-access-token")
    )


def test_a_user_name_with_a_colon_is_a_reference() -> None:
    found = container_of("alpine", {"password": "r:p", "username": "r:u", "registry": "mirror.example"})
    assert isinstance(found, ImageContainer)
    assert found.log_in is not None
    assert found.log_in.references == (SecretRef("r", "u"), SecretRef("r", "p"))
    assert found.log_in.server == "mirror.example"


@pytest.mark.spec("scaler 28.4.2")
@pytest.mark.parametrize("password", [":x", "x:", "hunter2"])
def test_what_is_no_reference_is_refused_without_being_repeated(password: str) -> None:
    with pytest.raises(ValueError, match="password") as caught:
        container_of("alpine", {"password": password})
    assert "hunter2" not in str(caught.value)


@pytest.mark.spec("scaler 28.4.5")
def test_a_dockerfile_needs_a_registry_to_log_in_to() -> None:
    with pytest.raises(ValueError, match="registry"):
        container_of("dockerfile:D", {"password": "r:p"})
    found = container_of("dockerfile:D", {"password": "r:p", "registry": "ghcr.io"})
    assert isinstance(found, BuiltContainer)
    assert found.log_in is not None
