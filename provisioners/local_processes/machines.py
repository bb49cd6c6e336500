"""Reference provisioner: "machines" that are processes of this host, one agent each.

    machines.py serve [--state DIR] [--port PORT --secret-file FILE]   keep the machines; run it as a service
    machines.py up | down                                              the steps of the workflow beside this file
    machines.py list                                                   what there is

What a step starts ends with the step, so the machines belong to `serve`, which the steps ask over a Unix socket.
With `--port` it also takes the events themselves, as signed webhooks.

Making one is safe to repeat: a machine is a folder named after its agent before it is a process, and an agent that
has a folder gets no second one.  Removing one that is not there is no error.
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kici.domain.event import SCALE_DOWN, SCALE_UP, ScaleDown, ScaleUp, read_scale_down, read_scale_up

STOP_SECONDS = 5.0
BODY_BYTES_MAX = 256 * 1024
KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR")


def default_state() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("MACHINES_STATE") or Path(base) / "kici-local-machines")


# --- the service


class Machines:
    """The processes, and the folder in which each has its record."""

    def __init__(self, state: Path, agent: list[str]) -> None:
        self._state = state
        self._agent = agent
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        state.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def up(self, event: ScaleUp) -> str:
        folder = self._folder(event.agent_id)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            return "is there already"
        (folder / "machine.json").write_text(json.dumps({"scaler": event.scaler_name, "made": time.time()}))
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        env |= {
            "KICI_ORCHESTRATOR_URL": event.orchestrator_url,
            "KICI_SCALER_CLAIM_CODE": event.claim_code,
            "KICI_SCALER_MANAGED": "true",
        }
        with (folder / "agent.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self._agent,
                cwd=folder,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (folder / "pid").write_text(f"{process.pid}\n")
        self._processes[event.agent_id] = process
        return f"runs as process {process.pid}"

    async def down(self, event: ScaleDown) -> str:
        process = self._processes.pop(event.agent_id, None)
        folder = self._folder(event.agent_id)
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if not folder.exists():
            return "is not known"
        shutil.rmtree(folder, ignore_errors=True)
        return f"is gone ({event.reason})"

    def listed(self) -> list[dict[str, Any]]:
        """Everything with our mark, running or not: the inventory."""
        return [
            {
                "agentId": folder.name,
                "running": (process := self._processes.get(folder.name)) is not None and process.returncode is None,
                **json.loads((folder / "machine.json").read_text() if (folder / "machine.json").exists() else "{}"),
            }
            for folder in sorted(self._state.glob("scaler-event-*"))
        ]

    async def close(self) -> None:
        for agent_id in list(self._processes):
            await self.down(ScaleDown(scaler_name="", agent_id=agent_id, reason="shutdown", request_id=""))

    def _folder(self, agent_id: str) -> Path:
        if not agent_id.startswith("scaler-event-") or "/" in agent_id:
            raise ValueError(f"{agent_id!r} is no agent of an event scaler")
        return self._state / agent_id


async def handle(machines: Machines, name: str, payload: Mapping[str, Any]) -> str:
    """One event.  Raises `ValueError` for what is none."""
    if name == SCALE_UP:
        up = read_scale_up(payload)
        return f"{up.agent_id} {await machines.up(up)}"
    if name == SCALE_DOWN:
        down = read_scale_down(payload)
        return f"{down.agent_id} {await machines.down(down)}"
    raise ValueError(f"{name} is no scale event")


async def serve(state: Path, agent: list[str], port: int | None, secret: str | None) -> None:
    machines = Machines(state, agent)
    path = state / "socket"
    path.unlink(missing_ok=True)

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ask = json.loads(await reader.readline())
            answer = machines.listed() if ask["name"] == "list" else await handle(machines, ask["name"], ask["payload"])
            writer.write(json.dumps({"answer": answer}).encode())
        except (ValueError, KeyError, OSError) as error:
            writer.write(json.dumps({"error": str(error)}).encode())
        writer.close()

    servers = [await asyncio.start_unix_server(asked, path, limit=BODY_BYTES_MAX)]
    if port is not None:
        assert secret is not None
        webhook = Webhook(machines, secret)
        servers.append(await asyncio.start_server(webhook.asked, "127.0.0.1", port))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    for server in servers:
        server.close()
    await machines.close()
    path.unlink(missing_ok=True)


class Webhook:
    """The smallest HTTP there is: one signed POST for each connection."""

    def __init__(self, machines: Machines, secret: str) -> None:
        self._machines = machines
        self._secret = secret

    async def asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, text = await self._answer(reader)
        body = text.encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[HTTPStatus, str]:
        from standardwebhooks.webhooks import Webhook as Signed
        from standardwebhooks.webhooks import WebhookVerificationError

        try:
            _, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(min(int(headers["content-length"]), BODY_BYTES_MAX))
            event = Signed(self._secret).verify(body, headers)
            return HTTPStatus.OK, await handle(self._machines, event["type"], event["data"])
        except WebhookVerificationError as error:
            return HTTPStatus.UNAUTHORIZED, str(error)
        except (ValueError, KeyError, asyncio.IncompleteReadError) as error:
            return HTTPStatus.BAD_REQUEST, str(error)
        except OSError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error)


# --- the steps


def ask(state: Path, name: str, payload: Mapping[str, Any]) -> Any:
    """Ask the service.  Raises `OSError` when it is not there, `ValueError` with its answer when it refuses."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(state / "socket"))
        connection.sendall(json.dumps({"name": name, "payload": dict(payload)}).encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        text = b"".join(iter(lambda: connection.recv(65536), b""))
    answer = json.loads(text)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["answer"]


def event_of_step() -> dict[str, Any]:
    """The event of this step; its secret comes apart."""
    payload: dict[str, Any] = json.loads(os.environ["KICI_EVENT_PAYLOAD"])
    if "KICI_EVENT_CLAIM_CODE" in os.environ:
        payload["claimCode"] = os.environ["KICI_EVENT_CLAIM_CODE"]
    return payload


def main() -> int:
    parser = argparse.ArgumentParser(description="Machines that are processes of this host.")
    parser.add_argument("what", choices=("serve", "up", "down", "list"))
    parser.add_argument("--state", type=Path, default=default_state())
    parser.add_argument("--agent", type=shlex.split, default=["kici-agent"], help="the agent's command line")
    parser.add_argument("--port", type=int, help="take webhooks on this loopback port, too")
    parser.add_argument("--secret-file", type=Path, help="signing secret of the webhooks")
    args = parser.parse_args()
    if args.what == "serve":
        if (args.port is None) != (args.secret_file is None):
            parser.error("--port and --secret-file go together")
        secret = None if args.secret_file is None else args.secret_file.read_text().strip()
        asyncio.run(serve(args.state, args.agent, args.port, secret))
        return 0
    try:
        name = {"up": SCALE_UP, "down": SCALE_DOWN, "list": "list"}[args.what]
        answer = ask(args.state, name, {} if args.what == "list" else event_of_step())
    except (OSError, ValueError) as error:
        print(f"machines: {error}; does `machines.py serve` run on this host?", file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2) if args.what == "list" else answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
