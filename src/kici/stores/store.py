"""`ports.store.Store` over any database: the parts, put together."""

from kici.stores.addresses import Addresses
from kici.stores.agents import Agents
from kici.stores.claims import Claims
from kici.stores.cluster import Cluster
from kici.stores.events import Events
from kici.stores.job_ends import JobEnds
from kici.stores.job_reads import JobReads
from kici.stores.job_sweeps import JobSweeps
from kici.stores.jobs import JobMoves
from kici.stores.logs import Logs
from kici.stores.outcomes import Provisions
from kici.stores.peers import Peers
from kici.stores.query import Query
from kici.stores.records import AccessLog, Facts, Secrets, Settings
from kici.stores.tokens import Tokens
from kici.stores.workers import Workers


class SqlStore(
    JobMoves,
    JobEnds,
    JobReads,
    JobSweeps,
    Logs,
    Agents,
    Tokens,
    Cluster,
    Peers,
    Workers,
    Events,
    Claims,
    Provisions,
    Addresses,
    Settings,
    Secrets,
    AccessLog,
    Facts,
):
    async def migrate(self) -> list[int]:
        return await self._database.migrate()

    async def ping(self) -> None:
        await self._database.read(Query.PING, {})

    async def close(self) -> None:
        await self._database.close()
