"""The webhook of `docs/how-ci-sends-jobs.md`, as it stands on that page, against the real programs."""

import hashlib
import hmac
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kici.testing.ports import free_port
from kici.testing.programs import CoordinatorProgram, until

PAGE = Path(__file__).parents[2] / "docs" / "how-ci-sends-jobs.md"
SECRET = "between the forge and us"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def hook(kici: CoordinatorProgram, tmp_path: Path) -> Iterator[str]:
    """The address of the webhook, running with a token that may only submit."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made = kici.run("admin", "token", "create", "forge", "--role", "submitter")
    assert made.returncode == 0, made.stderr
    port = free_port()
    given = {"KICI_URL": f"http://127.0.0.1:{kici.port}", "KICI_TOKEN": made.stdout.strip().splitlines()[-1]}
    with (tmp_path / "hook.log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **given, "WEBHOOK_SECRET": SECRET, "PORT": str(port)},
            stderr=log,
        )
    until(lambda: _answers(port), seconds=60, what="the webhook listens")
    yield f"http://127.0.0.1:{port}"
    program.terminate()
    program.wait(10)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def push(tmp_path: Path) -> dict[str, object]:
    """A push event of a repository whose `make test` prints a line."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "Makefile").write_text("test:\n\t@echo tested $$COMMIT\n")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a test"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    return {"after": head, "repository": {"clone_url": str(repository)}}


def deliver(address: str, push: dict[str, object], *, secret: str = SECRET) -> int:
    body = json.dumps(push).encode()
    signature = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    request = urllib.request.Request(address, body, {"X-Hub-Signature-256": signature})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_push_becomes_one_job_however_often_it_is_delivered(
    kici: CoordinatorProgram, hook: str, push: dict[str, object]
) -> None:
    assert deliver(hook, push) < 300
    assert deliver(hook, push) < 300
    until(lambda: [job["status"] for job in kici.jobs().values()] == ["success"], seconds=60, what="the job succeeds")
    (job_id,) = kici.jobs()
    assert kici.output(job_id) == f"tested {push['after']}\n"


def test_a_push_with_a_wrong_signature_is_refused(kici: CoordinatorProgram, hook: str, push: dict[str, object]) -> None:
    assert deliver(hook, push, secret="guessed") == 403
    assert kici.jobs() == {}
