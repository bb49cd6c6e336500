"""Records about an agent say which job it works for, whoever wrote them.

Only here is it known for all of them: a backend knows no jobs, and an agent may get its job later than it is made.
"""

import logging
from collections.abc import Callable, Mapping


class Attribution(logging.Filter):
    """Adds to records with an `agent_id` what `find` knows of that agent: `job_id` and `run_id`."""

    def __init__(self, find: Callable[[str], Mapping[str, str]]) -> None:
        super().__init__()
        self._find = find

    def filter(self, record: logging.LogRecord) -> bool:
        facts = getattr(record, "kici", None)
        if isinstance(facts, dict) and isinstance(agent_id := facts.get("agent_id"), str):
            found = {name: value for name, value in self._find(agent_id).items() if facts.get(name) is None}
            if found:
                record.__dict__["kici"] = {**facts, **found}
        return True


def attribute_logs(find: Callable[[str], Mapping[str, str]]) -> None:
    """For all records of this process from now on."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(Attribution(find))
