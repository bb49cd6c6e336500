from dataclasses import replace

import pytest

from kici.decide import registration
from kici.decide.registration import (
    PRIVILEGED_ROOT_LABEL,
    Accept,
    AgentRecord,
    Claimant,
    Known,
    LiveConnection,
    Refuse,
    admit_agent,
    authenticate,
)
from kici.domain.agent import AgentKind, AgentToken
from kici.domain.ids import AgentId, Instant, TokenId
from kici.wire.messages import CloseCode

NOW = Instant(1_000_000)
MADE = AgentId("scaler-container-0000000a")
LABELS = ("linux", "gpu", "kici:scaler:pool")
EPHEMERAL = AgentToken(
    id=TokenId("t1"),
    hash="h",
    prefix="kat_1234",
    kind=AgentKind.EPHEMERAL,
    labels=frozenset(LABELS),
    gate=frozenset({"gpu"}),
    agent_id=MADE,
    created_at=Instant(0),
    expires_at=Instant(NOW + 1),
)
STATIC = replace(
    EPHEMERAL, id=TokenId("t2"), kind=AgentKind.STATIC, agent_id=None, labels=None, gate=frozenset(), expires_at=None
)
RECORD = AgentRecord(gate=frozenset({"gpu", "linux"}), labels=LABELS, token_id=EPHEMERAL.id)
KNOWN = Known(record=RECORD)
NOBODY = Known()


def register(
    agent_id: str = MADE,
    *,
    labels: tuple[str, ...] = LABELS,
    token: AgentToken | None = EPHEMERAL,
    known: Known = KNOWN,
    uid: int | None = None,
    now: int = NOW,
    requires_token: bool = True,
) -> Accept | Refuse:
    claimant = Claimant(agent_id=AgentId(agent_id), labels=frozenset(labels), uid=uid)
    return admit_agent(claimant, token, now=Instant(now), known=known, requires_token=requires_token)


def code(answer: Accept | Refuse) -> int | None:
    return answer.close_code if isinstance(answer, Refuse) else None


def test_close_codes_are_those_of_the_protocol() -> None:
    assert registration.INVALID == CloseCode.INVALID_MESSAGE
    assert registration.INTERNAL == CloseCode.INTERNAL
    assert registration.AUTH_FAILED == CloseCode.AUTH_FAILED
    assert registration.DISMISSED == CloseCode.DISMISSED
    for close_code in (
        registration.INVALID,
        registration.INTERNAL,
        registration.AUTH_FAILED,
        registration.DISMISSED,
    ):
        refusal = Refuse(close_code=close_code, reason="")
        assert refusal.is_permanent == (close_code in CloseCode.PERMANENT)


def test_a_made_agent_registers_with_the_gate_of_its_record() -> None:
    assert register() == Accept(
        labels=frozenset(LABELS), gate=frozenset({"gpu", "linux"}), scaler_managed=True, supersedes=False
    )


def test_a_static_agent_registers_with_the_gate_of_its_token_and_canonical_labels() -> None:
    token = replace(STATIC, gate=frozenset({"team"}))
    assert register("mine", labels=(" Linux ", "GPU"), token=token, known=NOBODY) == Accept(
        labels=frozenset({"linux", "gpu"}), gate=frozenset({"team"}), scaler_managed=False, supersedes=False
    )


def test_without_a_token_nobody_is_admitted_where_one_is_required() -> None:
    assert code(register(token=None)) == CloseCode.AUTH_FAILED
    assert authenticate(None, now=NOW, holds_job=False) is not None


def test_where_no_token_is_required_made_agents_still_need_their_record_and_its_labels() -> None:
    assert isinstance(register("mine", token=None, known=NOBODY, requires_token=False), Accept)
    assert isinstance(register(token=None, requires_token=False), Accept)
    assert code(register(token=None, known=NOBODY, requires_token=False)) == CloseCode.INTERNAL
    assert code(register(token=None, labels=(*LABELS, "x"), requires_token=False)) == CloseCode.AUTH_FAILED


def test_an_expired_token_admits_nobody() -> None:
    assert code(register(now=NOW + 1)) == CloseCode.AUTH_FAILED
    assert isinstance(register(now=NOW), Accept)


def test_an_expired_token_still_admits_its_own_agent_while_that_holds_a_job() -> None:
    holding = replace(KNOWN, holds_job=True)
    assert isinstance(register(now=NOW + 10**9, known=holding), Accept)
    assert code(register("scaler-container-0000000b", now=NOW + 10**9, known=holding)) == CloseCode.AUTH_FAILED
    assert authenticate(EPHEMERAL, now=Instant(NOW + 1), holds_job=True) is None


def test_an_expired_static_token_admits_nobody_whatever_the_agent_holds() -> None:
    token = replace(STATIC, expires_at=Instant(0))
    holding = replace(NOBODY, holds_job=True)
    assert code(register("mine", token=token, known=holding)) == CloseCode.AUTH_FAILED


def test_a_revoked_token_admits_nobody_whatever_the_agent_holds() -> None:
    token = replace(EPHEMERAL, revoked_at=Instant(0))
    assert code(register(token=token, known=replace(KNOWN, holds_job=True))) == CloseCode.AUTH_FAILED


@pytest.mark.parametrize("uid", [None, 1000])
def test_the_root_label_is_only_for_root(uid: int | None) -> None:
    labels = ("linux", PRIVILEGED_ROOT_LABEL)
    assert code(register("mine", labels=labels, token=STATIC, known=NOBODY, uid=uid)) == CloseCode.AUTH_FAILED
    assert isinstance(register("mine", labels=labels, token=STATIC, known=NOBODY, uid=0), Accept)


@pytest.mark.spec("T2.2", "scaler 2.4.4")
def test_labels_outside_the_token_are_refused_but_for_self_reported_ones() -> None:
    assert isinstance(register(labels=(*LABELS, "kici:os:linux", "kici:runtime:docker")), Accept)
    assert code(register(labels=(*LABELS, "arm64"))) == CloseCode.AUTH_FAILED
    assert code(register(labels=(*LABELS, "kici:role:builder"))) == CloseCode.AUTH_FAILED


def test_role_labels_go_without_saying_for_static_tokens() -> None:
    token = replace(STATIC, labels=frozenset({"linux"}))
    labels = ("linux", "kici:role:builder")
    assert isinstance(register("mine", labels=labels, token=token, known=NOBODY), Accept)
    assert code(register("mine", labels=("linux", "gpu"), token=token, known=NOBODY)) == CloseCode.AUTH_FAILED


@pytest.mark.spec("T2.2")
def test_a_token_of_one_agent_does_not_admit_another() -> None:
    assert code(register("scaler-container-0000000b")) == CloseCode.AUTH_FAILED
    assert code(register("mine", known=NOBODY)) == CloseCode.AUTH_FAILED


@pytest.mark.spec("scaler 21.6.12")
def test_an_id_that_is_connected_with_another_token_is_refused() -> None:
    live = LiveConnection(token_id=TokenId("t3"))
    answer = register("mine", token=STATIC, known=Known(live=live))
    assert code(answer) == CloseCode.INVALID_MESSAGE


@pytest.mark.spec("T2.4")
def test_a_second_connection_with_the_same_token_supersedes_the_first() -> None:
    answer = register(known=replace(KNOWN, live=LiveConnection(token_id=EPHEMERAL.id)))
    assert isinstance(answer, Accept)
    assert answer.supersedes


@pytest.mark.spec("T0.5", "scaler 21.6.7", "scaler 49.4")
def test_a_made_agent_whose_record_cannot_be_read_may_try_again_and_loses_nothing() -> None:
    answer = register(known=Known(record_readable=False))
    assert isinstance(answer, Refuse)
    assert (answer.close_code, answer.is_permanent, answer.reclaims) == (CloseCode.INTERNAL, False, False)


@pytest.mark.spec("scaler 21.6.6")
def test_a_made_agent_without_record_is_refused_and_reclaimed_even_with_a_static_token() -> None:
    for token in (EPHEMERAL, STATIC):
        answer = register(token=token, known=NOBODY)
        assert isinstance(answer, Refuse)
        assert (answer.close_code, answer.is_permanent, answer.reclaims) == (CloseCode.INTERNAL, False, True)


@pytest.mark.spec("scaler 21.6.8")
def test_a_static_agent_does_not_wait_for_the_scalers_records() -> None:
    assert isinstance(register("my-host-1", token=STATIC, known=Known(record_readable=False)), Accept)


def test_a_static_token_cannot_take_the_place_of_a_made_agent() -> None:
    assert code(register(token=STATIC)) == CloseCode.AUTH_FAILED


def test_an_agent_that_is_being_torn_down_is_sent_away_for_good() -> None:
    answer = register(known=Known(record=replace(RECORD, is_ending=True)))
    assert isinstance(answer, Refuse)
    assert (answer.close_code, answer.is_permanent) == (CloseCode.DISMISSED, True)
