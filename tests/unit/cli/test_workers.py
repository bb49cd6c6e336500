"""The commands about workers: `kici worker`, `join-token create`, `worker revoke`, `peers`."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli.test_admin import admin

from kici.adapters.data_dir import DataDir
from kici.adapters.entropy import SystemEntropy
from kici.adapters.worker_keys import FileWorkerKeys, read_token_file
from kici.apps.worker import link_url
from kici.cli.main import kici
from kici.decide.forget import ForgetOutcome
from kici.domain.errors import Misconfigured
from kici.domain.ids import InstanceId, Instant
from kici.domain.worker import JoinClaim, Worker, join_token_text, read_join_token
from kici.testing.served_surface import Served

TOKEN = join_token_text(JoinClaim(role="worker", expires_at=Instant(1)), "00ff")
EVENTS = """
version: 1
scalers:
  - name: cloud
    type: event
    maxAgents: 2
    provisioningTargets: [provisioner]
    labelSets:
      - labels: [linux]
"""


def test_a_join_token_is_printed_alone(served: Served) -> None:
    printed = admin(served, "join-token", "create", "--expires", "10m")
    assert "kici_join_v1." in printed
    (token,) = served.fake.workers.tokens
    assert token.expires_at - token.created_at == 600_000


def test_join_tokens_are_listed_and_taken_back(served: Served) -> None:
    assert "no join tokens" in served.kici("admin", "join-token", "list").stderr
    admin(served, "join-token", "create")
    assert "join-0" in admin(served, "join-token", "list")
    assert "join-0 revoked" in admin(served, "join-token", "revoke", "join-0")
    assert served.fake.workers.tokens == []
    refused = served.kici("admin", "join-token", "revoke", "join-0")
    assert refused.exit_code == 1
    assert "no join token join-0" in refused.stderr


def test_peers_show_workers_and_what_they_are_linked_to(served: Served) -> None:
    served.fake.workers.add(Worker(id="w1", name="build-7", joined_at=Instant(1)))
    served.fake.workers.add(Worker(id="w2", name="build-8", joined_at=Instant(1), revoked_at=Instant(2)))
    printed = admin(served, "peers")
    assert "instance-1 (this one)" in printed
    assert "build-7" in printed
    assert "away" in printed
    assert "revoked" in printed


def test_a_worker_is_revoked_by_its_id(served: Served) -> None:
    served.fake.workers.add(Worker(id="w1", name="build-7", joined_at=Instant(1), linked_to=(InstanceId("a"),)))
    assert "w1 revoked" in admin(served, "worker", "revoke", "w1")
    assert served.fake.workers.rows["w1"].revoked_at is not None


@pytest.mark.spec("scaler 44")
def test_a_peer_is_forgotten_by_its_id(served: Served) -> None:
    assert admin(served, "peer", "forget", "gone") == "why\n"
    served.fake.coordinator.forget_outcome = ForgetOutcome.ACKNOWLEDGEMENT_REQUIRED
    refused = served.kici("admin", "peer", "forget", "gone", "--acknowledge")
    assert refused.exit_code == 1
    assert "why" in refused.stderr
    assert served.fake.coordinator.forgotten == [("gone", False), ("gone", True)]


def starts(tmp_path: Path, *words: str, scalers: str = "version: 1\nscalers: []\n") -> Result:
    """A worker that has a reason not to start."""
    file = tmp_path / "scalers.yaml"
    file.write_text(scalers)
    options = ("--scalers", str(file), "--data-dir", str(tmp_path / "data"), *words)
    return CliRunner().invoke(kici, ["worker", *options], env={"KICI_CLUSTER_COORDINATOR_URL": ""})


def test_a_worker_needs_a_coordinator(tmp_path: Path) -> None:
    result = starts(tmp_path)
    assert result.exit_code == 2
    assert "--join" in result.output


@pytest.mark.parametrize("text", ["", "hello", "kici_join_v1.!.00", "kici_join_v1.e30.00"])
def test_a_file_without_a_join_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(Misconfigured, match="join-token create"):
        read_token_file(file)
    with pytest.raises(Misconfigured, match="cannot use"):
        read_token_file(tmp_path / "absent")


def test_a_join_token_says_what_it_is_for() -> None:
    assert read_join_token(f" {TOKEN}\n") == JoinClaim(role="worker", expires_at=Instant(1))


def test_a_host_without_any_right_says_how_to_get_it(tmp_path: Path) -> None:
    result = starts(tmp_path, "--join", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "join-token create" in result.output


def test_event_scalers_belong_to_coordinators(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    result = starts(tmp_path, "--join", "http://127.0.0.1:1", "--token-file", str(token), scalers=EVENTS)
    assert result.exit_code == 1
    assert "scaler cloud" in result.output


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://c:4000", "ws://c:4000/ws/worker"),
        ("https://c.example/", "wss://c.example/ws/worker"),
        ("ws://c:4000/ws", "ws://c:4000/ws/worker"),
        ("wss://c/kici/ws/worker", "wss://c/kici/ws/worker"),
        ("c:4000", "ws://c:4000/ws/worker"),
    ],
)
def test_coordinators_may_be_named_as_people_know_them(address: str, url: str) -> None:
    assert link_url(address) == url


@pytest.mark.parametrize("address", ["ftp://c", "http://", "://"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Misconfigured, match="--join"):
        link_url(address)


def test_a_credential_is_kept_for_its_owner_only_and_survives(tmp_path: Path) -> None:
    data_dir = DataDir.open(tmp_path / "data")
    try:
        keys = FileWorkerKeys(data_dir, "once")
        assert (keys.credential(), keys.join_token()) == (None, "once")
        keys.keep("sesame")
        assert (data_dir.path / "worker-credential").stat().st_mode & 0o777 == 0o600
        assert FileWorkerKeys(data_dir, None).credential() == "sesame"
        keys.keep(None)
        assert FileWorkerKeys(data_dir, None).credential() is None
        assert data_dir.relay_port() == 0
        data_dir.keep_relay_port(4711)
        assert data_dir.relay_port() == 4711
        assert data_dir.instance_id(SystemEntropy())
    finally:
        data_dir.close()
