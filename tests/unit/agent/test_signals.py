import subprocess
import sys

PROGRAM = """
import asyncio, os, signal
from kici.agent.signals import handle_signals

async def main():
    told = asyncio.Queue()
    handled = (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD)
    handle_signals(asyncio.get_running_loop(), {each: lambda each=each: told.put_nowait(each) for each in handled})
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
        print((await told.get()).name)
    os.posix_spawn("/bin/sh", ["sh", "-c", ""], {})
    print((await told.get()).name)

asyncio.run(main())
"""


def test_each_signal_is_told_on_the_loop() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split() == ["SIGUSR1", "SIGTERM", "SIGTERM", "SIGCHLD"]
