"""Jobs in microVMs from the command line: real coordinator, real VMM, and what a guest can reach."""

import signal

import pytest
from tests.microvm.lab import INTERNET, LAN, METADATA, around, until
from tests.microvm.orchestra import GATEWAY, PORT, PYTHON, firecracker_entry, orchestra, qemu_entry

pytestmark = [pytest.mark.xdist_group("microvms"), pytest.mark.timeout(240)]


@pytest.mark.engine("firecracker")
def test_a_job_runs_in_a_microvm_of_real_firecracker_and_nothing_is_left() -> None:
    with orchestra(firecracker_entry()) as one:
        done = one.coordinator.run("run", "-l", "tiny", "--", "hello")
        assert done.returncode == 0, done.stderr + one.log()[-3000:]
        assert done.stdout == "hello from a microVM\n"
        one.until_clean()


@pytest.mark.engine("firecracker")
def test_a_coordinator_that_is_killed_takes_its_microvms_back() -> None:
    with orchestra(firecracker_entry()) as one:
        job = one.coordinator.run("run", "-d", "-l", "tiny", "--", "hold").stdout.strip()
        until(lambda: one.coordinator.job(job)["status"] == "running", seconds=120, what="the job runs")
        before = one.vm_processes()
        one.coordinator.stop(signal.SIGKILL)
        one.coordinator.start()
        assert one.vm_processes() == before
        (vm_id,) = before
        assert f'"event":"spawn.recovered","logger":"kici","agent_id":"{vm_id}"' in one.log()
        listed = one.coordinator.admin("scaler", "orphans", "list", "--all")["items"]
        assert [(each["id"], each["status"]) for each in listed] == [(vm_id, "tracked")]
        stopped = one.coordinator.run("admin", "scaler", "orphans", "stop", vm_id, "--yes")
        assert stopped.returncode == 1
        assert f"{vm_id} is not stopped - tracked" in stopped.stderr
        one.coordinator.run("cancel", job, "--force")


@pytest.mark.engine("firecracker")
@pytest.mark.spec("scaler 36.18.18")
def test_boot_data_is_there_at_boot_and_unreadable_once_the_agent_has_it() -> None:
    with orchestra(firecracker_entry()) as one:
        done = one.coordinator.run("run", "-l", "tiny", "--", "metadata")
        assert done.returncode == 0, done.stderr
        # The agent registered, so it had read its credential; now the same request shows nothing.
        assert done.stdout == "status 200 {}\n"


@pytest.mark.engine("firecracker")
def test_a_guest_reaches_the_coordinator_and_the_internet_and_nothing_else() -> None:
    entry = firecracker_entry()
    with orchestra(entry) as one, around(one.host):
        one.host.serve(f"{GATEWAY}:9090", "127.0.0.1:9091")
        places = [
            f"{GATEWAY}:{PORT}",
            f"{GATEWAY}:9090",
            f"{LAN}:80",
            f"{INTERNET}:80",
            "203.0.113.1:22",
            "10.200.0.77:80",
        ]
        done = one.coordinator.run("run", "-l", "tiny", "--", "probe", *places)
        assert done.returncode == 0, done.stderr
        found = dict(line.split() for line in done.stdout.splitlines())
        assert found == {
            f"{GATEWAY}:{PORT}": "open",
            f"{GATEWAY}:9090": "forbidden",
            f"{LAN}:80": "forbidden",
            f"{INTERNET}:80": "open",
            "203.0.113.1:22": "forbidden",
            "10.200.0.77:80": "unreachable",
        }


LOOK_AROUND = """
import glob, os, select, socket, sys
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    probe = socket.socket()
    probe.settimeout(3)
    print(place, "open" if probe.connect_ex((host, int(port))) == 0 else "closed")
    probe.close()
def text(path):
    with open(path, "rb", buffering=0) as file:
        return file.read(100000).replace(b"\\0", b" ").decode(errors="replace")
print("command line:", text("/proc/cmdline").strip())
print("first process:", text("/proc/1/environ"), text("/proc/1/cmdline"))
print("agent:", text(f"/proc/{os.getppid()}/environ"), text(f"/proc/{os.getppid()}/cmdline"))
print("own:", *sorted(os.environ))
for path in glob.glob("/dev/vport*"):
    port = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ready = select.select([port], [], [], 1)[0]
    print("port:", os.read(port, 1000) if ready else b"")
print(os.uname().sysname, os.getuid())
open("/written", "w").close()
print("written" if os.path.exists("/written") else "")
"""


@pytest.mark.engine("qemu")
def test_a_job_runs_in_a_linux_guest_of_qemu_reaches_what_it_may_and_finds_no_secret() -> None:
    with orchestra(qemu_entry()) as one, around(one.host):
        one.host.serve(f"{GATEWAY}:9090")
        places = [f"{GATEWAY}:{PORT}", f"{GATEWAY}:9090", f"{LAN}:80", f"{METADATA}:80", f"{INTERNET}:80"]
        done = one.coordinator.run("run", "-l", "vm", "--", *PYTHON, LOOK_AROUND, *places, seconds=180)
        assert done.returncode == 0, done.stderr + done.stdout
        lines = done.stdout.splitlines()
        assert lines[: len(places)] == [
            f"{GATEWAY}:{PORT} open",
            f"{GATEWAY}:9090 closed",
            f"{LAN}:80 closed",
            f"{METADATA}:80 closed",
            f"{INTERNET}:80 open",
        ]
        assert lines[-2:] == ["Linux 0", "written"]
        assert "kat_" not in done.stdout, "a job must not find the credential of its agent"
        assert "port: b''" in lines, done.stdout
        one.until_clean()


@pytest.mark.engine("qemu")
def test_a_guest_that_boots_while_its_coordinator_is_killed_still_gets_its_boot_data() -> None:
    with orchestra(qemu_entry()) as one:
        job = one.coordinator.run("run", "-d", "-l", "vm", "--", *PYTHON, "print('told')").stdout.strip()
        until(lambda: '"step":"guest","phase":"done"' in one.log(), seconds=60, what="the guest starts to boot")
        one.coordinator.stop(signal.SIGKILL)
        (vm_id,) = one.vm_processes()
        one.coordinator.start()
        until(lambda: one.coordinator.job(job)["status"] == "success", seconds=120, what="the job has run")
        assert one.coordinator.job(job)["agentId"] == vm_id
