"""Rules of agents on a real engine: what they let through and what they do not, seen from inside the containers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import TABLE, LabCoordinator, a_pool, coordinator, import_images, rules

from kici.testing.programs import until

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("docker-network"), pytest.mark.timeout(180)]

GATEWAY: Final = "172.30.0.1"
LAN: Final = "10.20.0.7"
ALLOWED: Final = "10.21.0.7"
METADATA: Final = "169.254.169.254"
INTERNET: Final = "203.0.113.10"
PORT: Final = 4711
PROBE: Final = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.rsplit(":", 1)
    s = socket.socket()
    s.settimeout(2)
    try:
        s.connect((host, int(port)))
        print(place, "open")
    except OSError as error:
        print(place, "closed")
"""
INVENTED: Final = "172.30.200.200"
FORGE: Final = """
import socket, struct, sys, time

def checksum(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF

def packet(source, host, port, text):
    body = struct.pack("!HHHH", 4444, port, 8 + len(text), 0) + text
    head = [0x45, 0, 20 + len(body), 7, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(host)]
    head[7] = checksum(struct.pack("!BBHHHBBH4s4s", *head))
    return struct.pack("!BBHHHBBH4s4s", *head) + body

*forged, first, second = sys.argv[1:]
plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
plain.connect((first.split(":")[0], 9))
own = plain.getsockname()[0]
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
frames.bind(("eth0", 0))
mine = frames.getsockname()[4]
gateway = next(line.split()[3] for line in open("/proc/net/arp") if line.startswith("172.30.0.1 "))
to = bytes.fromhex(gateway.replace(":", ""))
for place in (first, second):
    host, port = place.rsplit(":", 1)
    for source in forged:
        text = ("forged %s as %s" % (place, source)).encode()
        text += b" " * (len(text) % 2)
        raw.sendto(packet(source, host, int(port), text), (host, 0))
        theirs = bytes((2, 66)) + socket.inet_aton(source)
        for sender in (mine, theirs):
            frames.send(to + sender + bytes((8, 0)) + packet(source, host, int(port), text))
    for _ in range(3):
        plain.sendto(("honest " + place).encode(), (host, int(port)))
        time.sleep(0.2)
print(own)
"""
PYTHON: Final = ("/opt/kici/lib/ld.so", "--library-path", "/opt/kici/lib", "/opt/kici/bin/python3.11")


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        _build_a_world(running)
        yield running


@pytest.fixture(scope="module")
def kici(engine: Lab) -> Iterator[LabCoordinator]:
    policies = {
        "plain": {},
        "allow": {"allowlist": [f"{ALLOWED}/32"]},
        "deny": {"denyAll": True},
        "deny-but": {"denyAll": True, "allowlist": ["203.0.113.0/24"]},
        "host": {"hostAccess": ["*:9090", f"{GATEWAY}:{PORT}"]},
        "shut": {"hostAccess": []},
    }
    scalers = [a_pool(engine, name, set={"networkPolicy": policy}) for name, policy in policies.items()]
    scalers.append(a_pool(engine, "open", networkIsolation=False, orchestratorUrl=f"ws://172.29.0.1:{PORT}/ws"))
    with coordinator(engine, "network", *scalers, port=PORT) as running:
        yield running


def _build_a_world(lab: Lab) -> None:
    """Behind the lab: a private network, a metadata service and a public address, each with a web server; and two
    servers on the host itself."""
    lab.run("ip", "link", "add", "out0", "type", "veth", "peer", "name", "out1")
    world = f"{lab.name}-world"
    lab.run("ip", "netns", "add", world)
    try:
        lab.run("ip", "link", "set", "out1", "netns", world)
    finally:
        lab.others_namespaces.append(world)
    lab.run("ip", "addr", "add", "198.51.100.1/24", "dev", "out0")
    lab.run("ip", "link", "set", "out0", "up")
    inside = ("ip", "netns", "exec", world)
    for address in ("198.51.100.2/24", f"{LAN}/32", f"{ALLOWED}/32", f"{METADATA}/32", f"{INTERNET}/32"):
        lab.run(*inside, "ip", "addr", "add", address, "dev", "out1")
    lab.run(*inside, "ip", "link", "set", "out1", "up")
    lab.run(*inside, "ip", "link", "set", "lo", "up")
    lab.run(*inside, "ip", "route", "add", "default", "via", "198.51.100.1")
    for target in (LAN, ALLOWED, METADATA, INTERNET):
        lab.run("ip", "route", "add", f"{target}/32", "via", "198.51.100.2")
    server = Path(__file__).with_name("listen.py")
    lab.spawn(*inside, "python3", server, "80")
    for port in ("8080", "9090"):
        lab.spawn("python3", server, port)


def probe(kici: LabCoordinator, label: str, *places: str) -> dict[str, str]:
    """What a job of this pool can reach."""
    done = kici.run("run", "-l", label, "--", *PYTHON, "-I", "-S", "-c", PROBE, *places)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def test_by_default_private_networks_metadata_and_host_are_closed_and_the_internet_is_open(
    kici: LabCoordinator,
) -> None:
    found = probe(
        kici,
        "plain",
        f"{LAN}:80",
        f"{ALLOWED}:80",
        f"{METADATA}:80",
        f"{INTERNET}:80",
        f"{GATEWAY}:8080",
        f"{GATEWAY}:{kici.port}",
        "198.51.100.1:8080",
    )
    assert found == {
        f"{LAN}:80": "closed",
        f"{ALLOWED}:80": "closed",
        f"{METADATA}:80": "closed",
        f"{INTERNET}:80": "open",
        f"{GATEWAY}:8080": "closed",
        f"{GATEWAY}:{kici.port}": "open",
        "198.51.100.1:8080": "closed",
    }


def test_without_isolation_all_of_it_is_open(kici: LabCoordinator) -> None:
    """So it is the rules that closed it above."""
    places = (f"{LAN}:80", f"{METADATA}:80", f"{INTERNET}:80", "172.29.0.1:8080")
    assert set(probe(kici, "open", *places).values()) == {"open"}


@pytest.mark.spec("scaler 31.7.1")
def test_an_allowlist_opens_what_it_names(kici: LabCoordinator) -> None:
    found = probe(kici, "allow", f"{LAN}:80", f"{ALLOWED}:80", f"{INTERNET}:80")
    assert found == {f"{LAN}:80": "closed", f"{ALLOWED}:80": "open", f"{INTERNET}:80": "open"}


@pytest.mark.spec("scaler 31.7.2")
def test_deny_all_leaves_the_coordinator_and_the_allowlist(kici: LabCoordinator) -> None:
    assert probe(kici, "deny", f"{INTERNET}:80", f"{LAN}:80", f"{GATEWAY}:{kici.port}") == {
        f"{INTERNET}:80": "closed",
        f"{LAN}:80": "closed",
        f"{GATEWAY}:{kici.port}": "open",
    }
    assert probe(kici, "deny-but", f"{INTERNET}:80", f"{LAN}:80") == {f"{INTERNET}:80": "open", f"{LAN}:80": "closed"}


def test_host_access_replaces_what_is_granted(kici: LabCoordinator) -> None:
    assert probe(kici, "host", f"{GATEWAY}:9090", f"{GATEWAY}:8080") == {
        f"{GATEWAY}:9090": "open",
        f"{GATEWAY}:8080": "closed",
    }


def test_no_host_access_means_not_even_the_coordinator(kici: LabCoordinator) -> None:
    kici.settle()
    job = kici.submit("true", "-l", "shut")
    until(lambda: len(kici.containers()) == 1, seconds=60, what="its agent is made")
    (one,) = kici.containers()

    def output() -> str:
        return kici.lab.run("sh", "-c", f"docker -H unix://{kici.lab.socket} logs {one['Id']} 2>&1")

    until(
        lambda: "cannot connect" in output() or "agent.disconnected" in output(), seconds=60, what="it cannot connect"
    )
    assert kici.job(job)["status"] == "queued"
    assert kici.run("cancel", job).returncode == 0
    kici.settle()


def test_agents_cannot_reach_each_other(kici: LabCoordinator) -> None:
    kici.settle()
    listening = kici.submit("nc -l -p 7000 -e echo hi", "-l", "plain")
    until(lambda: kici.job(listening)["status"] == "running", seconds=60, what="the first one listens")
    (one,) = kici.containers()
    address = one["NetworkSettings"]["Networks"]["kici-agent-net"]["IPAddress"]
    assert probe(kici, "plain", f"{address}:7000") == {f"{address}:7000": "closed"}
    assert kici.run("cancel", listening).returncode == 0
    kici.settle()


def test_packets_from_an_invented_or_a_borrowed_address_get_nowhere(kici: LabCoordinator) -> None:
    """Really sent, from a raw socket and as whole frames: neither to the internet nor to the host, neither from an
    address that nobody has nor from a neighbour's, who may reach both."""
    kici.settle()
    neighbour = kici.submit("sleep 1000", "-l", "plain")
    until(lambda: kici.job(neighbour)["status"] == "running", seconds=60, what="the neighbour runs")
    (one,) = kici.containers()
    borrowed = one["NetworkSettings"]["Networks"]["kici-agent-net"]["IPAddress"]
    heard = kici.lab.folder / "heard"
    heard.write_text("")
    datagrams = Path(__file__).with_name("listen_datagrams.py")
    world = ("ip", "netns", "exec", kici.lab.others_namespaces[0])
    kici.lab.spawn(*world, "python3", datagrams, "5300", output=heard)
    kici.lab.spawn("python3", datagrams, str(kici.port), output=heard)
    until(lambda: heard.read_text().count("listening") == 2, seconds=60, what="both listen")
    targets = (f"{INTERNET}:5300", f"{GATEWAY}:{kici.port}")
    done = kici.run("run", "-l", "plain", "--", *PYTHON, "-I", "-S", "-c", FORGE, INVENTED, borrowed, *targets)
    assert done.returncode == 0, done.stderr
    own = done.stdout.strip()
    until(
        lambda: {f"honest {one} from" in heard.read_text() for one in targets} == {True},
        seconds=60,
        what="all is heard",
    )
    told = [line for line in heard.read_text().splitlines() if line != "listening"]
    assert own not in (borrowed, INVENTED)
    assert sorted(set(told)) == [
        f"honest {GATEWAY}:{kici.port} from {own}",
        f"honest {INTERNET}:5300 from 198.51.100.1",  # as the engine translates it
    ]
    assert kici.run("cancel", neighbour).returncode == 0
    kici.settle()


@pytest.mark.spec("scaler 31.7.5")
def test_after_destroy_no_rule_is_left_and_a_neighbours_stands(kici: LabCoordinator) -> None:
    first, second = (kici.submit("while ! test -e /stop; do sleep 0.1; done", "-l", "plain") for _ in range(2))
    until(
        lambda: {kici.job(job)["status"] for job in (first, second)} == {"running"}, seconds=60, what="both of them run"
    )
    assert len(rules(kici.lab)) == 2
    assert kici.run("cancel", first).returncode == 0
    until(lambda: len(rules(kici.lab)) == 1, seconds=60, what="the first one's rules are gone")
    assert kici.job(second)["status"] == "running"

    def chains() -> tuple[int, int]:
        listed = kici.lab.run("nft", "list", "table", "inet", TABLE)
        return listed.count("chain f_"), listed.count("chain i_")

    until(lambda: chains() == (1, 1), seconds=60, what="and its chains; the second one's stand")
    assert kici.run("cancel", second).returncode == 0
    until(lambda: not rules(kici.lab), seconds=60, what="the second one's rules are gone")
    until(
        lambda: "chain f_" not in kici.lab.run("nft", "list", "table", "inet", TABLE), seconds=60, what="and its chains"
    )


def test_without_the_right_to_filter_the_refusal_says_so(engine: Lab) -> None:
    """No agent is made that could not be isolated; the job that waits tells why."""
    powerless = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
    with coordinator(engine, "powerless", a_pool(engine), within=powerless) as kici:
        job = kici.submit("true", "-l", "pool")
        until(lambda: "NET_ADMIN is missing" in kici.run("explain", job).stdout, seconds=60, what="it is explained")
        assert not kici.containers()
        assert kici.run("cancel", job).returncode == 0
