"""What the agent asks of the kernel, tried in processes of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kici.agent import host

SRC = Path(__file__).parents[3] / "src"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux shows what is tested here in /proc")


def run(script: str, **environ: str) -> str:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC), **environ}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    return done.stdout


def test_credentials_are_wiped_from_what_others_may_read() -> None:
    script = """
from kici.agent import host
environ = host.take_environment()
import os
import socket
print(environ["KICI_AGENT_TOKEN"], environ["KICI_SCALER_CLAIM_CODE"], "KICI_AGENT_TOKEN" in os.environ)
print(open("/proc/self/environ").read().replace("\\0", "\\n"))
"""
    text = run(script, KICI_AGENT_TOKEN="kat_0123456789", KICI_SCALER_CLAIM_CODE="codecode", OTHER="kept")
    first, _, rest = text.partition("\n")
    assert first == "kat_0123456789 codecode False"
    assert "kat_" not in rest
    assert "codecode" not in rest
    assert "OTHER=kept" in rest


def test_an_empty_or_missing_credential_is_no_trouble() -> None:
    script = "from kici.agent import host; print(host.take_environment().get('KICI_AGENT_TOKEN'))"
    assert run(script) == "None\n"
    assert run(script, KICI_AGENT_TOKEN="") == "\n"


def test_the_shield_closes_memory_and_adopts_orphans() -> None:
    script = """
import ctypes
from kici.agent import host
host.shield()
libc = ctypes.CDLL(None)
adopts = ctypes.c_int()
libc.prctl(37, ctypes.byref(adopts), 0, 0, 0)
print(libc.prctl(3, 0, 0, 0, 0), adopts.value)
"""
    assert run(script) == "0 1\n"


def test_children_are_found_killed_and_reaped_with_their_signal() -> None:
    script = """
import subprocess, time
from kici.agent import host
first = subprocess.Popen(["sleep", "1000"])
second = subprocess.Popen(["sh", "-c", "exit 3"])
print(sorted(host.children()) == sorted([first.pid, second.pid]))
host.kill(first.pid)
ended = {}
while len(ended) < 2:
    ended.update(host.reap())
print(ended[first.pid], ended[second.pid], host.children(), host.reap())
host.kill(first.pid)
host.signal_group(first.pid, 15)
first.returncode = second.returncode = 0
"""
    assert run(script) == "True\n-9 3 [] []\n"


def test_facts_describe_this_machine() -> None:
    facts = host.facts()
    assert facts.system == sys.platform
    assert facts.cpu_count == os.cpu_count()
    assert facts.uid == os.getuid()
    assert facts.memory_mb > 100
    assert facts.hostname == facts.hostname.lower()
    assert len(facts.random_hex8) == 8
    assert facts.random_hex8 != host.facts().random_hex8


def test_an_engine_is_one_whose_socket_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "podman" / "podman.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert host.find_engine({"DOCKER_HOST": f"unix://{path}"}) == ("podman", f"unix://{path}")
        assert host.find_engine({"CONTAINER_HOST": "tcp://10.0.0.1:2375"}) == ("docker", "tcp://10.0.0.1:2375")
        assert host.find_engine({"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}) is None
    assert host.find_engine({"DOCKER_HOST": f"unix://{tmp_path}"}) is None
