"""`kici-agent`: the agent as a program."""

import gc
import os
import sys
from collections.abc import Sequence
from typing import Final

from kici.kit.version import VERSION

USAGE: Final = """usage: kici-agent

Runs an agent of a KiCI coordinator.  It is told everything by its environment:

  KICI_ORCHESTRATOR_URL   the coordinator, such as ws://127.0.0.1:4000/ws (required)
  KICI_AGENT_TOKEN        its credential
  KICI_LABELS             comma-separated labels that jobs may ask for
  KICI_AGENT_ID           its name (default: host name and 8 random hex digits)

All settings are listed in docs/reference/agent.md.
TERM ends it and its job; USR1 lets it finish its job first.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        sys.stdout.write(f"kici-agent {VERSION}\n")
        return 0
    if arguments:
        asks = arguments[0] in ("-h", "--help")
        (sys.stdout if asks else sys.stderr).write(USAGE)
        return 0 if asks else 2
    gc.disable()  # nothing that imports make is garbage
    from kici.agent import host, program
    from kici.domain.errors import Misconfigured

    gc.enable()
    gc.freeze()
    try:
        environ = host.take_environment()
    except Misconfigured as error:
        return program.refused(error)
    return program.run(environ)


def program() -> None:
    """The console script.  Never returns."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # a name look-up may hang in a thread, for which Python would wait


if __name__ == "__main__":
    program()
