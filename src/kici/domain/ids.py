"""Identifiers: one type for each kind of id, so that they cannot be mixed up."""

import re
from typing import Final, NewType

JobId = NewType("JobId", str)
RunId = NewType("RunId", str)
AgentId = NewType("AgentId", str)
InstanceId = NewType("InstanceId", str)
ConnectionId = NewType("ConnectionId", str)
TokenId = NewType("TokenId", str)
ScalerName = NewType("ScalerName", str)
OrgId = NewType("OrgId", str)
ClassId = NewType("ClassId", int)
"""A demand class: all jobs that ask for exactly the same (see `domain.job.Demand`)."""

Instant = NewType("Instant", int)
"""A moment: whole milliseconds since the epoch, UTC."""

DEFAULT_ORG: Final = OrgId("default")
SCALER_AGENT_PREFIX: Final = "scaler-"
"""Every agent id that a scaler mints starts with this; nobody else may register under it."""

_SCALER_AGENT = re.compile(r"scaler-[a-z-]+-[0-9a-f]{8}\Z")


def scaler_agent_id(backend_type: str, hex8: str) -> AgentId:
    """The id of a new scaler-made agent: `scaler-<backend type>-<8 hex>`."""
    agent_id = f"{SCALER_AGENT_PREFIX}{backend_type}-{hex8}"
    assert _SCALER_AGENT.match(agent_id), agent_id
    return AgentId(agent_id)


def is_scaler_agent(agent_id: AgentId) -> bool:
    """Whether this id claims to be of a scaler-made agent."""
    return agent_id.startswith(SCALER_AGENT_PREFIX)
