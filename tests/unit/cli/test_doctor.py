import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from kici.cli.main import kici

LOCAL = ("scaler local", "scaler local, containers of jobs")
Rows = dict[str, tuple[str, str]]


def doctor(*arguments: str, code: int = 0) -> Rows:
    """Check -> status and message."""
    result = CliRunner().invoke(kici, ["doctor", "--json", *arguments], env={"KICI_DATA_DIR": None})
    assert result.exit_code == code, result.output
    return {row["check"]: (row["status"], row["message"]) for row in json.loads(result.stdout)}


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    found = doctor("--data-dir", str(tmp_path / "new"), "--port", "0")
    assert {"python", "data directory", "port", "control groups", "isolation", *LOCAL} == set(found)
    assert "fail" not in {status for status, _ in found.values()}


def test_a_taken_port_is_in_the_way(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = doctor("--data-dir", str(tmp_path), "--port", str(number), code=1)
    assert found["port"][0] == "fail"
    assert "--port" in found["port"][1]


def test_a_running_coordinator_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "endpoint").write_text("http://127.0.0.1:4000\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = doctor("--data-dir", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert found["port"] == ("ok", "a coordinator of this data directory runs at http://127.0.0.1:4000")


def test_a_data_directory_below_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = doctor("--data-dir", str(tmp_path / "file" / "data"), "--port", "0", code=1)
    assert found["data directory"][0] == "fail"


def test_a_missing_agent_program_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "scalers.yaml"
    file.write_text(
        "version: 1\nscalers:\n  - {name: gpu, type: bare-metal, maxAgents: 1,\n"
        "     labelSets: [{labels: [gpu], binaryPath: /nowhere/kici-agent}]}\n"
    )
    found = doctor("--data-dir", str(tmp_path), "--port", "0", "--scalers", str(file), code=1)
    assert "/nowhere/kici-agent" in found["scaler gpu"][1]


def test_a_wrong_configuration_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "scalers.yaml"
    file.write_text("version: 1\nscalers: 5\n")
    found = doctor("--data-dir", str(tmp_path), "--port", "0", "--scalers", str(file), code=1)
    assert found["scalers"][0] == "fail"


def test_wrong_settings_are_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(kici, ["doctor", "--port", "99999"])
    assert result.exit_code == 2
    assert "99999" in result.stderr


def test_machine_pools_need_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scalers.yaml"
    file.write_text(
        "version: 1\nmachinePools: [{name: ci, cap: {maxCpu: 4}}]\nscalers:\n  - {name: local, type: bare-metal, "
        "maxAgents: 1, machinePool: ci,\n     labelSets: [{labels: [linux], binaryPath: kici-agent}]}\n"
    )
    wanted = ("--data-dir", str(tmp_path), "--port", "0", "--scalers", str(file))
    monkeypatch.setenv("KICI_MACHINE_LEDGER_DIR", str(tmp_path / "ledger"))
    status, text = doctor(*wanted)["machine pools"]
    assert (status, str(tmp_path / "ledger") in text) == ("ok", True)
    assert not (tmp_path / "ledger").exists(), "looking makes nothing"
    monkeypatch.setenv("KICI_MACHINE_LEDGER_DIR", str(file / "ledger"))
    status, text = doctor(*wanted, code=1)["machine pools"]
    assert (status, "KICI_MACHINE_LEDGER_DIR" in text) == ("fail", True)


def test_an_engine_elsewhere_that_does_not_answer_is_named_with_what_happened(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # free once the block ends: nobody listens there
    file = tmp_path / "scalers.yaml"
    file.write_text(
        f"version: 1\nscalers:\n  - {{name: far, type: container, maxAgents: 1, host: 'tcp://127.0.0.1:{port}',\n"
        "     networkIsolation: false, orchestratorUrl: 'ws://ci.example:4000/ws',\n"
        "     labelSets: [{labels: [far], image: 'debian:12'}]}\n"
    )
    found = doctor("--data-dir", str(tmp_path), "--port", "0", "--scalers", str(file), code=1)
    status, message = found["scaler far"]
    assert status == "fail"
    assert f"the container engine at tcp://127.0.0.1:{port} does not answer (" in message
    assert "Connect call failed" in message
