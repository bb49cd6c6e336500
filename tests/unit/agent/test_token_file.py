"""A credential that comes in a file."""

import os
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
