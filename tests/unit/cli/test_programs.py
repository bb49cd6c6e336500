"""The command lines as such: what they offer, how fast they start, and how they find a coordinator."""

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kici.cli.connection import connect, data_dir
from kici.cli.errors import NoCoordinator
from kici.cli.lazy import Lazy
from kici.cli.main import ADMIN_COMMANDS, COMMANDS, admin, kici
from kici.cli.values import DURATION, PAIR
from kici.kit.version import VERSION
from kici.testing.served_surface import Served

HEAVY = {"aiohttp", "asyncio", "msgspec", "rich", "yaml", "kici.config", "kici.web", "kici.services"}


@pytest.mark.parametrize("name", [*COMMANDS, *ADMIN_COMMANDS])
def test_every_command_is_where_the_table_says_and_explains_itself(name: str) -> None:
    lazy: Lazy = (COMMANDS | ADMIN_COMMANDS)[name]
    module, _, attribute = lazy.place.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_help_lists_every_command() -> None:
    text = CliRunner().invoke(kici, ["--help"]).stdout
    assert all(name in text for name in COMMANDS)
    assert "kici up" in text


@pytest.mark.parametrize(("wrong", "right"), [("job-s", "jobs"), ("cancle", "cancel"), ("statsu", "--help")])
def test_a_misspelt_command_is_answered_with_the_nearest(wrong: str, right: str) -> None:
    result = CliRunner().invoke(kici, [wrong])
    assert result.exit_code == 2
    assert right in result.stderr


@pytest.mark.parametrize("group", [kici, admin])
def test_the_version_is_shown(group: click.Group) -> None:
    result = CliRunner().invoke(group, ["--version"], prog_name=group.name)
    assert result.stdout == f"{group.name} {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [(["--version"], set()), (["--help"], set()), (["run", "--help"], set()), (["jobs", "--help"], set())],
)
def test_a_start_imports_nothing_heavy(arguments: list[str], allowed: set[str]) -> None:
    code = (
        "import sys\nfrom kici.cli.main import kici\n"
        f"try: kici.main({arguments!r}, prog_name='kici')\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not (HEAVY - allowed) & set(done.stderr.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_both_programs(shell: str) -> None:
    text = CliRunner().invoke(kici, ["completion", shell]).stdout
    assert "_KICI_COMPLETE" in text
    assert "_KICI_ADMIN_COMPLETE" in text


def test_the_data_directory_leads_to_coordinator_and_token(served: Served, tmp_path: Path) -> None:
    (tmp_path / "endpoint").write_text(f"{served.url}\n")
    (tmp_path / "owner-token").write_text("owner\n")
    environ = {"KICI_URL": None, "KICI_TOKEN": None, "KICI_DATA_DIR": None}
    for arguments in (["jobs", "--data-dir", str(tmp_path)], ["--data-dir", str(tmp_path), "jobs"]):
        assert CliRunner().invoke(kici, arguments, env=environ).exit_code == 0
    state = tmp_path / "state"
    state.mkdir()
    (state / "kici").symlink_to(tmp_path)
    assert CliRunner().invoke(kici, ["jobs"], env={**environ, "XDG_STATE_HOME": str(state)}).exit_code == 0


def token_for(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], url: str | None, folder: str | None) -> object:
    monkeypatch.setattr("kici.cli.connection.environment", lambda: environ)
    return connect(url, folder)._token


def test_the_owners_token_is_not_sent_to_strangers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kici").mkdir()
    (tmp_path / "kici" / "owner-token").write_text("secret\n")
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert token_for(monkeypatch, environ, "http://ci.example:4000", None) is None
    assert token_for(monkeypatch, environ, "http://127.0.0.1:4000", None) == "secret"
    assert token_for(monkeypatch, environ, "http://ci.example:4000", str(tmp_path / "kici")) == "secret"
    assert token_for(monkeypatch, {**environ, "KICI_TOKEN": "mine"}, "http://ci.example:4000", None) == "mine"
    (tmp_path / "kici" / "endpoint").write_text("http://ci.example:4000\n")
    assert token_for(monkeypatch, environ, None, None) == "secret"


def test_the_address_has_an_order_of_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def url(environ: dict[str, str], given: str | None = None) -> str:
        monkeypatch.setattr("kici.cli.connection.environment", lambda: {"KICI_DATA_DIR": str(tmp_path), **environ})
        return connect(given, None).url

    with pytest.raises(NoCoordinator, match="kici up"):
        url({})
    (tmp_path / "endpoint").write_text("http://a:1\n")
    assert url({}) == "http://a:1"
    assert url({"KICI_ADMIN_URL": "http://b:1"}) == "http://b:1"
    assert url({"KICI_ADMIN_URL": "http://b:1", "KICI_URL": "http://c:1/"}) == "http://c:1"
    assert url({"KICI_URL": "http://c:1"}, "http://d:1") == "http://d:1"


def test_the_data_directory_has_an_order_of_sources() -> None:
    environ = {"KICI_DATA_DIR": "/a", "XDG_STATE_HOME": "/b"}
    assert data_dir("/c", environ) == Path("/c")
    assert data_dir(None, environ) == Path("/a")
    assert data_dir(None, {"XDG_STATE_HOME": "/b"}) == Path("/b/kici")


@pytest.mark.parametrize("url", ["4000", "ftp://a", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    result = CliRunner().invoke(kici, ["jobs", "--url", url])
    assert result.exit_code == 1
    assert "http://127.0.0.1:4000" in result.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5h", 5400), ("30m", 1800), ("200ms", 0.2), ("2d", 172800)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "=x", "x"])
def test_pairs_need_a_name_and_a_sign(text: str) -> None:
    with pytest.raises(click.BadParameter):
        PAIR.convert(text, None, None)
