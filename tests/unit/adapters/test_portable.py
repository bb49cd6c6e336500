"""What `ps` says on hosts without `/proc`: real lines of macOS and Linux."""

from kici.adapters.proc import Seen
from kici.adapters.processes_portable import parse_marks, parse_ps

PS = """\
    1     0     1 Ss   Sun Nov 29 21:01:42 2026
  412     1   412 S    Mon Jan  4 01:02:03 2027
  413   412   412 Z+   Mon Jan  4 01:02:04 2027
  broken
"""


def test_processes() -> None:
    found = parse_ps(PS)
    assert found == {1: Seen(1, 0, 1, 1, 1795986102), 412: Seen(412, 1, 412, 412, 1799024523)}


def test_marks() -> None:
    text = (
        "  412 /opt/agent HOME=/Users/ci AGENT_COMPUTE_MARK=/data/agents/a SHELL=/bin/zsh\n"
        "  413 python -X AGENT_COMPUTE_MARK=/data/agents/b -m kici.apps.agent\n"
        "  414 sleep 10\n"
    )
    assert parse_marks(text) == {412: "/data/agents/a", 413: "/data/agents/b"}
