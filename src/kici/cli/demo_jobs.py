"""The sample jobs of `kici demo`: several shapes, and how each must end."""

from dataclasses import dataclass
from typing import Final

from kici.cli.client import Json

LINES: Final = 20_000
OUTPUT_BYTES: Final = sum(len(f"{number}\n") for number in range(1, LINES + 1))
SECRET_CONTEXT, SECRET_KEY, SECRET_VALUE = "demo", "token", "correct-horse-battery-staple"
LONG_SLEEP: Final = "sleep 300"
CANCEL_ME: Final = "cancelled"
UNROUTABLE: Final = "unroutable"
BIG_OUTPUT: Final = "big-output"
SECRET_JOB: Final = "secret"


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    shows: str
    expected: str
    exit_code: int | None
    document: Json

    @property
    def body(self) -> Json:
        return {"name": self.name, **self.document}


SAMPLES: Final = (
    Sample("hello", "any agent will do", "success", 0, {"run": "echo hello from $(uname -s)"}),
    Sample("labels", "runs where linux and x64 are", "success", 0, {"runsOn": ["linux", "x64"], "run": "uname -m"}),
    Sample("argv", "a command without a shell", "success", 0, {"command": ["sh", "-c", "echo one; echo two >&2"]}),
    Sample(
        "resources",
        "asks for cpu and memory",
        "success",
        0,
        {"run": "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done", "resources": {"cpus": 0.5, "memory": "256m"}},
    ),
    Sample("environment", "has variables", "success", 0, {"run": 'test "$GREETING" = hi', "env": {"GREETING": "hi"}}),
    Sample(
        SECRET_JOB,
        "gets a secret, which its output hides",
        "success",
        0,
        {"run": 'echo "the token is $TOKEN"', "secrets": {"TOKEN": f"{SECRET_CONTEXT}:{SECRET_KEY}"}},
    ),
    Sample(BIG_OUTPUT, f"{LINES} lines, none lost", "success", 0, {"run": f"seq {LINES}"}),
    Sample("failure", "fails with code 3", "failed", 3, {"run": "echo 'this is meant to fail' >&2; exit 3"}),
    Sample("timeout", "runs longer than 1 s", "timed_out", None, {"run": LONG_SLEEP, "timeoutSeconds": 1}),
    Sample(CANCEL_ME, "cancelled while it runs", "cancelled", None, {"run": LONG_SLEEP}),
    Sample(UNROUTABLE, "nobody has these labels", "unroutable", None, {"runsOn": ["gpu", "mars"], "run": "true"}),
)
RUN: Final[Json] = {
    "name": "pipeline",
    "jobs": {
        "build": {"run": "sleep 0.3; echo built"},
        "test-a": {"run": "echo a is fine", "needs": ["build"]},
        "test-b": {"run": "exit 1", "needs": ["build"]},
        "publish": {"run": "echo never", "needs": ["test-a", "test-b"]},
    },
}
RUN_SAMPLES: Final = (
    Sample("build", "first of a run", "success", 0, {}),
    Sample("test-a", "after build", "success", 0, {}),
    Sample("test-b", "after build; fails", "failed", 1, {}),
    Sample("publish", "needs both tests", "skipped", None, {}),
)
ALL: Final = {sample.name: sample for sample in (*SAMPLES, *RUN_SAMPLES)}
