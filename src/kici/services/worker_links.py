"""A worker's links to its coordinators: kept, one for each address, and made again for ever.

The first link trades the join token for a credential; the others wait for it.  A coordinator that refuses for good
is asked again now and then, since others may not; when all of them refuse, the worker is told so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Never, assert_never

from kici.domain.errors import Retryable
from kici.domain.ids import InstanceId
from kici.kit.backoff import exponential
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.link import Link
from kici.ports.workers import Dialer, WorkerKeys
from kici.services.worker_host import WorkerHost
from kici.wire.codec import encode
from kici.wire.worker_half import Effect, Keep, Ordered, Over, Send, Welcomed, WorkerHalf
from kici.wire.worker_messages import INVALID_PROOF, INVALID_TOKEN, WORKER_PROTOCOL, WorkerHello, WorkerMessage

FIRST_SECONDS: Final = 1.0
SECONDS_MAX: Final = 15.0
REFUSED_SECONDS: Final = 60.0
TICK_SECONDS: Final = 1.0
TURN_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    worker_id: str
    name: str
    version: str


class CoordinatorLink:
    """One connection.  Implements the gateway's session, and `Seat` once it is let in."""

    def __init__(self, *, link: Link, half: WorkerHalf, links: "WorkerLinks", url: str, clock: Clock) -> None:
        self.url = url
        self.instance_id = InstanceId("")
        self.is_seated = False
        self._link = link
        self._half = half
        self._links = links
        self._clock = clock

    def open(self) -> None:
        self._apply(self._half.opened())

    def send(self, message: WorkerMessage) -> None:
        self._half.said(self._clock.monotonic())
        self._link.send(encode(message))

    async def received(self, frame: bytes | str) -> None:
        self._apply(self._half.receive(frame, self._clock.monotonic()))
        await self._link.drain()

    async def closed(self, code: int) -> None:
        self._links.left(self, f"its connection closed ({code})")

    def tick(self) -> None:
        self._apply(self._half.tick(self._clock.monotonic()))

    def leave(self, reason: str) -> None:
        self._apply(self._half.leave(reason))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Keep(credential):
                    self._links.keep(credential)
                case Welcomed(instance_id):
                    self.instance_id = InstanceId(instance_id)
                    self._links.seated(self)
                case Ordered(order):
                    self._links.host.ordered(self, order)
                case Over(code, reason, is_permanent):
                    self._link.close(code, reason)
                    self._links.over(self, reason, is_permanent=is_permanent)
                case _:
                    assert_never(effect)


class WorkerLinks:
    def __init__(
        self,
        *,
        host: WorkerHost,
        urls: Sequence[str],
        dialer: Dialer,
        keys: WorkerKeys,
        identity: WorkerIdentity,
        clock: Clock,
        entropy: Entropy,
        gave_up: Callable[[str], None],
    ) -> None:
        """`gave_up(why)`: every coordinator refuses this worker for good."""
        self.host = host
        self._urls = tuple(urls)
        self._dialer = dialer
        self._keys = keys
        self._identity = identity
        self._clock = clock
        self._entropy = entropy
        self._gave_up = gave_up
        self._sessions: dict[CoordinatorLink, None] = {}
        self._joining: str | None = None
        """The address at which the join token is being traded."""
        self._refusals: dict[str, list[str]] = {}
        self._failures: dict[str, int] = dict.fromkeys(urls, 0)
        self._token_is_spent = False
        self._is_leaving = False

    def url_of(self, instance_id: InstanceId | None) -> str | None:
        """The address of a coordinator that we are linked to: this one, or any; None: there is none."""
        seated = [session for session in self._sessions if session.is_seated]
        chosen = next((session for session in seated if session.instance_id == instance_id), None)
        in_order = sorted(seated, key=lambda session: self._urls.index(session.url))
        return (chosen or in_order[0]).url if seated else None

    async def keep_linked(self, url: str) -> Never:
        """Keep one link for ever.  Leave by cancellation."""
        while True:
            while self._keys.credential() is None and self._joining not in (None, url):
                await self._clock.sleep(TURN_SECONDS)
            await self._visit(url)
            await self._clock.sleep(self._pause(url))

    async def run_timers(self) -> Never:
        """Let the timers of all links act.  Leave by cancellation."""
        while True:
            await self._clock.sleep(TICK_SECONDS)
            for session in tuple(self._sessions):
                session.tick()

    def leave(self, reason: str) -> None:
        """The program ends."""
        self._is_leaving = True
        for session in tuple(self._sessions):
            session.leave(reason)

    async def _visit(self, url: str) -> None:
        """One connection, from its beginning to its end."""
        if self._is_leaving:
            return
        if self._keys.credential() is None:
            self._joining = url
        try:
            await self._dialer.dial(url, _Door(self, url))
        except Retryable as error:
            self._failures[url] += 1
            if self._failures[url] == 1:
                emit(Event.WORKER_LOST, url=url, reason=str(error))
        finally:
            if self._joining == url:
                self._joining = None

    def _pause(self, url: str) -> float:
        if url in self._refusals:
            return REFUSED_SECONDS
        seconds = exponential(max(1, self._failures[url]), base=FIRST_SECONDS, maximum=SECONDS_MAX)
        return seconds * self._entropy.uniform(0.5, 1.0)

    # ------------------------------------------------------------------ for sessions

    def begin(self, link: Link, url: str) -> CoordinatorLink:
        identity = self._identity
        hello = WorkerHello(
            worker_id=identity.worker_id,
            name=identity.name,
            protocol_version=WORKER_PROTOCOL,
            version=identity.version,
            nonce=self._entropy.hex(16),
        )
        half = WorkerHalf(
            hello,
            credential=self._keys.credential(),
            join_token=None if self._token_is_spent else self._keys.join_token(),
            now=self._clock.monotonic(),
        )
        session = CoordinatorLink(link=link, half=half, links=self, url=url, clock=self._clock)
        self._sessions[session] = None
        session.open()
        return session

    def keep(self, credential: str) -> None:
        self._keys.keep(credential)
        self._joining = None
        self._token_is_spent = True

    def seated(self, session: CoordinatorLink) -> None:
        session.is_seated = True
        self._failures[session.url] = 0
        self._refusals.pop(session.url, None)
        emit(Event.WORKER_LINKED, url=session.url, instance_id=session.instance_id)
        self.host.attach(session)

    def over(self, session: CoordinatorLink, reason: str, *, is_permanent: bool) -> None:
        """The conversation is over, for a reason."""
        self.left(session, reason)
        if is_permanent:
            self._refused(session.url, reason)

    def left(self, session: CoordinatorLink, why: str) -> None:
        """The connection is gone."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        self._failures[session.url] += 1
        if session.is_seated:
            session.is_seated = False
            self.host.detach(session)
            emit(Event.WORKER_LOST, url=session.url, instance_id=session.instance_id, reason=why)

    def _refused(self, url: str, reason: str) -> None:
        """This coordinator will not have us as we are."""
        emit(Event.WORKER_REFUSED, url=url, reason=reason)
        had_credential = self._keys.credential() is not None
        # An attempt to join that was answered to nobody may have been carried out after the one that we go by.
        is_outdated = had_credential and reason == INVALID_PROOF
        may_join = self._keys.join_token() is not None and (is_outdated or not self._token_is_spent)
        self._refusals.setdefault(url, []).append(reason)
        if had_credential and may_join and not self._is_seated_anywhere():
            self._keys.keep(None)  # the token may make us a worker again
            self._token_is_spent = False
            del self._refusals[url]
            return
        if not had_credential:
            self._token_is_spent = self._token_is_spent or reason == INVALID_TOKEN
        if all(each in self._refusals for each in self._urls):
            self._gave_up("; ".join(sorted({each for known in self._refusals.values() for each in known})))

    def _is_seated_anywhere(self) -> bool:
        return any(session.is_seated for session in self._sessions)


class _Door:
    """The handler of one dialled connection."""

    def __init__(self, links: WorkerLinks, url: str) -> None:
        self._links = links
        self._url = url

    def connected(self, link: Link) -> CoordinatorLink:
        return self._links.begin(link, self._url)
