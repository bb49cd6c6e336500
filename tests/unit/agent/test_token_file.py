"""A credential that comes in a file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kici.agent.host import take_environment
from kici.domain.errors import Misconfigured


def test_it_is_taken_and_the_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("kat_x\n")
    monkeypatch.setenv("KICI_AGENT_TOKEN_FILE", str(file))
    environ = take_environment()
    assert environ["KICI_AGENT_TOKEN"] == "kat_x"
    assert "KICI_AGENT_TOKEN_FILE" not in environ
    assert "KICI_AGENT_TOKEN" not in os.environ
    assert not file.exists()


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_without_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KICI_AGENT_TOKEN_FILE", str(file))
    with pytest.raises(Misconfigured, match="KICI_AGENT_TOKEN_FILE"):
        take_environment()


def test_two_ways_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KICI_AGENT_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("KICI_AGENT_TOKEN", "kat_y")
    with pytest.raises(Misconfigured, match="one way only"):
        take_environment()


@pytest.fixture
def standard_input() -> Iterator[int]:
    """What is written here is this process's standard input, for the test."""
    kept = os.dup(0)
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    yield writing
    os.dup2(kept, 0)
    os.close(kept)


def test_it_may_come_by_standard_input_which_is_empty_from_then_on(
    standard_input: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KICI_AGENT_TOKEN_FILE", "/dev/stdin")
    os.write(standard_input, b"kat_x\nand more")
    assert take_environment()["KICI_AGENT_TOKEN"] == "kat_x"
    assert os.read(0, 100) == b""
    os.close(standard_input)


def test_a_standard_input_that_ends_without_one_is_named(standard_input: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KICI_AGENT_TOKEN_FILE", "/dev/stdin")
    os.close(standard_input)
    with pytest.raises(Misconfigured, match="/dev/stdin is empty"):
        take_environment()
