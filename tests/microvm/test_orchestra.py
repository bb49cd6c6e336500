"""Jobs in microVMs from the command line: real coordinator, real VMM, and what a guest can reach."""

import pytest
from tests.microvm.lab import INTERNET, LAN, METADATA, around
from tests.microvm.orchestra import GATEWAY, PORT, firecracker_entry, orchestra

pytestmark = pytest.mark.timeout(240)


@pytest.mark.engine("firecracker")
def test_a_job_runs_in_a_microvm_of_real_firecracker_and_nothing_is_left() -> None:
    with orchestra(firecracker_entry()) as one:
        done = one.coordinator.run("run", "-l", "tiny", "--", "hello")
        assert done.returncode == 0, done.stderr + one.log()[-3000:]
        assert done.stdout == "hello from a microVM\n"
        one.until_clean()


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
        assert METADATA
