"""The worker link without sockets: both halves, talking to each other or to somebody who does not keep the order."""

from dataclasses import dataclass, field

import pytest

from kici.domain.errors import Bug
from kici.wire import worker_gate, worker_half
from kici.wire.codec import encode
from kici.wire.messages import CloseCode, Unsupported
from kici.wire.worker_gate import GatePhase, Judge, Linked, WorkerGate
from kici.wire.worker_half import HalfPhase, Keep, Ordered, Over, Welcomed, WorkerHalf
from kici.wire.worker_messages import (
    Challenge,
    ComputeGone,
    DestroyAgent,
    LinkClose,
    MarkRegistered,
    ReapAgent,
    Refused,
    SweepOrphans,
    Welcome,
    WorkerBeat,
    WorkerHello,
    WorkerInventory,
    WorkerJoin,
    WorkerOffer,
    WorkerOrder,
    WorkerProof,
)
from kici.wire.worker_proof import COORDINATOR, WORKER, hash_of, is_proof, proof_of
from kici.wire.worker_pulse import BEAT_SECONDS, SILENCE_SECONDS

HELLO = WorkerHello(worker_id="w1", name="build-7", nonce="from the worker")
CREDENTIAL = "sesame"
NONCE = "from the coordinator"


@dataclass
class Talk:
    """Both halves and what each of them asked for, with a clock in hand."""

    credential: str | None = CREDENTIAL
    join_token: str | None = None
    known_hash: str = hash_of(CREDENTIAL)
    now: float = 100.0
    asked: list[worker_gate.Effect] = field(default_factory=list)
    done: list[worker_half.Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = WorkerGate(instance_id="c1", nonce=NONCE, now=self.now)
        self.half = WorkerHalf(HELLO, credential=self.credential, join_token=self.join_token, now=self.now)

    def to_gate(self, effects: list[worker_half.Effect]) -> None:
        for effect in effects:
            self.done.append(effect)
            if isinstance(effect, worker_half.Send):
                self.to_half(self.gate.receive(encode(effect.message), self.now))

    def to_half(self, effects: list[worker_gate.Effect]) -> None:
        for effect in effects:
            self.asked.append(effect)
            if isinstance(effect, worker_gate.Send):
                self.to_gate(self.half.receive(encode(effect.message), self.now))

    def judged(self) -> Judge:
        return next(effect for effect in self.asked if isinstance(effect, Judge))

    def linked(self) -> None:
        self.to_gate(self.half.opened())
        proof = proof_of(self.known_hash, side=COORDINATOR, nonce=HELLO.nonce, who="c1")
        self.to_half(self.gate.welcomed(proof=proof, credential=None))
        self.to_gate([worker_half.Send(WorkerOffer(scalers=(), max_agents=3))])
        self.to_gate([worker_half.Send(WorkerInventory(agents=()))])
        assert (self.gate.phase, self.half.phase) == (GatePhase.LINKED, HalfPhase.LINKED)

    def over(self) -> Over:
        return next(effect for effect in self.done if isinstance(effect, Over))


def closes(effects: list[worker_gate.Effect]) -> list[int]:
    return [effect.code for effect in effects if isinstance(effect, worker_gate.Close)]


def test_a_worker_shows_that_it_knows_its_credential_and_is_linked_when_it_told_what_it_has() -> None:
    talk = Talk()
    talk.to_gate(talk.half.opened())
    proof = talk.judged().proof
    assert isinstance(proof, WorkerProof)
    assert is_proof(proof.proof, hash_of(CREDENTIAL), side=WORKER, nonce=NONCE, who="w1")
    assert CREDENTIAL not in repr(talk.done)
    talk.linked()
    assert Welcomed("c1") in talk.done
    assert Linked(WorkerOffer(scalers=(), max_agents=3), WorkerInventory(agents=())) in talk.asked


@pytest.mark.spec("surroundings 4.2")
def test_a_join_token_is_traded_for_a_credential_that_is_kept_before_anything_else() -> None:
    talk = Talk(credential=None, join_token="once")
    talk.to_gate(talk.half.opened())
    assert talk.judged().proof == WorkerJoin(token="once")
    talk.to_half(talk.gate.welcomed(proof="", credential="new"))
    assert [effect for effect in talk.done if isinstance(effect, Keep | Welcomed)] == [Keep("new"), Welcomed("c1")]


def test_a_coordinator_that_does_not_know_the_credential_gives_no_orders() -> None:
    talk = Talk()
    talk.to_gate(talk.half.opened())
    talk.to_half(talk.gate.welcomed(proof="made up", credential=None))
    assert talk.over() == Over(LinkClose.REFUSED, "the coordinator does not know this worker's credential")
    assert talk.half.receive(encode(DestroyAgent(request_id="r", agent_id="a", reason="idle")), talk.now) == []


def test_a_proof_is_good_for_its_side_nonce_and_name_only() -> None:
    key = hash_of(CREDENTIAL)
    good = proof_of(key, side=WORKER, nonce=NONCE, who="w1")
    assert is_proof(good, key, side=WORKER, nonce=NONCE, who="w1")
    assert not is_proof(good, key, side=COORDINATOR, nonce=NONCE, who="w1")
    assert not is_proof(good, key, side=WORKER, nonce="another", who="w1")
    assert not is_proof(good, key, side=WORKER, nonce=NONCE, who="w2")
    assert not is_proof(good, hash_of("other"), side=WORKER, nonce=NONCE, who="w1")
    assert not is_proof("ä", key, side=WORKER, nonce=NONCE, who="w1")


@pytest.mark.spec("T4.2")
@pytest.mark.parametrize("is_permanent", [True, False])
def test_a_refusal_is_told_with_its_reason(is_permanent: bool) -> None:
    talk = Talk()
    talk.to_gate(talk.half.opened())
    talk.to_half(talk.gate.refused("Credential revoked", is_permanent=is_permanent))
    assert talk.over() == Over(LinkClose.REFUSED, "Credential revoked", is_permanent)
    assert closes(talk.asked) == [LinkClose.REFUSED if is_permanent else LinkClose.THROTTLED]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (WorkerHello(worker_id="w", name="n", nonce="x", protocol_version=0), "Unsupported protocol version"),
        (WorkerHello(worker_id="w", name="n", nonce="x", role="coordinator"), "Role mismatch"),
    ],
)
@pytest.mark.spec("surroundings 4.2")
def test_strange_peers_are_refused_before_anything_is_asked(hello: WorkerHello, reason: str) -> None:
    gate = WorkerGate(instance_id="c1", nonce=NONCE, now=0.0)
    told, closed = gate.receive(encode(hello), 0.0)
    assert told == worker_gate.Send(Refused(reason=reason))
    assert closed == worker_gate.Close(LinkClose.REFUSED, reason)


def test_work_before_the_proof_is_refused() -> None:
    gate = WorkerGate(instance_id="c1", nonce=NONCE, now=0.0)
    told = gate.receive(encode(ComputeGone(agent_id="a", how="x")), 0.0)
    assert told[0] == worker_gate.Send(Refused(reason="Missing auth method"))
    assert gate.receive(encode(HELLO), 0.0) == []


def test_orders_and_reports_pass_once_linked_and_what_is_unknown_is_answered() -> None:
    talk = Talk()
    talk.linked()
    gone = ComputeGone(agent_id="a", how="x")
    assert talk.gate.receive(encode(gone), talk.now) == [worker_gate.Received(gone)]
    mark = MarkRegistered(agent_id="a")
    assert talk.half.receive(encode(mark), talk.now) == [Ordered(mark)]
    unknown = b'{"type": "a.newer.message", "x": 1}'
    assert talk.gate.receive(unknown, talk.now) == [worker_gate.Send(Unsupported(what="a.newer.message"))]
    assert talk.half.receive(unknown, talk.now) == [worker_half.Send(Unsupported(what="a.newer.message"))]


@pytest.mark.spec("scaler 42.7.7")
@pytest.mark.parametrize(
    "order",
    [
        SweepOrphans(request_id="1", scaler="vms", owned=()),
        ReapAgent(request_id="1", agent_id="a"),
        DestroyAgent(request_id="1", agent_id="a", reason="idle"),
    ],
)
def test_a_worker_gives_no_orders_about_what_runs_elsewhere(order: WorkerOrder) -> None:
    talk = Talk()
    talk.linked()
    (answer,) = talk.gate.receive(encode(order), talk.now)
    assert isinstance(answer, worker_gate.Send)
    assert isinstance(answer.message, Unsupported)
    asked = b'{"type": "scaler.orphans", "action": "stop", "vmIds": ["a"]}'
    assert talk.gate.receive(asked, talk.now) == [worker_gate.Send(Unsupported(what="scaler.orphans"))]


def test_repeated_greetings_change_nothing_once_linked() -> None:
    talk = Talk()
    talk.linked()
    for message in (HELLO, WorkerProof(proof="x"), WorkerJoin(token="x"), WorkerBeat()):
        assert talk.gate.receive(encode(message), talk.now) == []
    for order in (Challenge(nonce="x", instance_id="y"), Welcome(instance_id="y"), WorkerBeat()):
        assert talk.half.receive(encode(order), talk.now) == []


def test_both_sides_beat_and_notice_silence() -> None:
    talk = Talk()
    talk.linked()
    soon = talk.now + BEAT_SECONDS
    assert talk.gate.tick(soon - 0.1) == []
    assert talk.half.tick(soon - 0.1) == []
    assert talk.gate.tick(soon) == [worker_gate.Send(WorkerBeat())]
    assert talk.half.tick(soon) == [worker_half.Send(WorkerBeat())]
    talk.gate.said(soon)
    talk.half.said(soon)
    assert talk.gate.tick(soon) == []
    assert talk.half.tick(soon) == []
    late = talk.now + SILENCE_SECONDS
    assert closes(talk.gate.tick(late)) == [CloseCode.HEARTBEAT]
    (over,) = talk.half.tick(late)
    assert isinstance(over, Over)
    assert (over.code, over.is_permanent) == (CloseCode.HEARTBEAT, False)
    assert talk.gate.tick(late) == []
    assert talk.half.tick(late) == []


def test_a_handshake_that_hangs_ends() -> None:
    talk = Talk()
    assert closes(talk.gate.tick(talk.now + worker_gate.HANDSHAKE_SECONDS)) == [CloseCode.TIMEOUT]
    (over,) = talk.half.tick(talk.now + worker_half.HANDSHAKE_SECONDS)
    assert isinstance(over, Over)
    assert over.code == CloseCode.TIMEOUT


@pytest.mark.parametrize("frame", [b"", b"[]", b'{"type": "worker.hello"}', b"\xff", b"x" * (5 * 1024 * 1024)])
def test_nonsense_ends_the_connection(frame: bytes) -> None:
    talk = Talk()
    assert closes(talk.gate.receive(frame, 0.0)) == [CloseCode.INVALID_MESSAGE]
    if frame != b'{"type": "worker.hello"}':
        assert [type(effect) for effect in talk.half.receive(frame, 0.0)] == [Over]


def test_a_judgement_that_nobody_asked_for_is_a_bug_and_a_late_one_is_nothing() -> None:
    talk = Talk()
    with pytest.raises(Bug, match="greeting"):
        talk.gate.welcomed(proof="", credential=None)
    assert talk.gate.dismissed(LinkClose.SUPERSEDED, "a newer link")
    assert talk.gate.welcomed(proof="", credential=None) == []
    assert talk.gate.refused("x", is_permanent=True) == []


def test_a_worker_without_anything_to_show_gives_up() -> None:
    talk = Talk(credential=None)
    talk.to_gate(talk.half.opened())
    assert talk.over().is_permanent


def test_a_join_that_yields_no_credential_is_no_welcome() -> None:
    talk = Talk(credential=None, join_token="once")
    talk.to_gate(talk.half.opened())
    talk.to_half(talk.gate.welcomed(proof="", credential=None))
    assert talk.over().code == LinkClose.REFUSED


def test_leaving_is_told_to_the_driver_once() -> None:
    talk = Talk()
    assert talk.half.leave("stopped") == [Over(CloseCode.GOING_AWAY, "stopped")]
    assert talk.half.leave("stopped") == []
