"""What a line says that an agent program printed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.agent_output import OURS, Said, said, without_tokens


@pytest.mark.spec("scaler 39.4.1")
def test_a_record_keeps_its_level_and_text_and_not_who_it_claims_to_be_from() -> None:
    line = '{"level":"warn","message":"x","service":"evil","agentId":"other","jobId":"job-9","size":3}'
    assert said(line) == Said(level="warning", text="x", more={"size": 3})


@pytest.mark.spec("scaler 39.4.2")
@pytest.mark.parametrize("line", ["hello", "[1,2]", '"text"', "3", "", "{", '{"a":', "{}x"])
def test_whatever_is_no_object_is_a_message(line: str) -> None:
    assert said(line) == Said(level="info", text=line)


@pytest.mark.parametrize(
    ("level", "ours"),
    [("info", "info"), ("DEBUG", "debug"), ("fatal", "error"), ("loud", "info"), (3, "info"), (None, "info")],
)
def test_other_programs_levels_become_ours(level: object, ours: str) -> None:
    assert said(json.dumps({"level": level, "message": "x"})).level == ours


@given(
    st.text() | st.dictionaries(st.text() | st.sampled_from(sorted(OURS)), st.integers() | st.text()).map(json.dumps)
)
def test_no_line_does_harm_or_names_its_own_origin(line: str) -> None:
    found = said(line)
    assert found.level in {"debug", "info", "warning", "error"}
    assert not OURS & found.more.keys()


def test_credentials_in_output_are_not_repeated() -> None:
    token = "kat_" + "0123456789abcdef" * 4
    assert without_tokens(f'KICI_AGENT_TOKEN={token} {{"token":"{token}"}}') == (
        'KICI_AGENT_TOKEN=kat_*** {"token":"kat_***"}'
    )
    assert without_tokens("kat_0123 and 0123456789abcdef0123456789abcdef") == (
        "kat_0123 and 0123456789abcdef0123456789abcdef"
    )
