import pytest

from kici.domain.access import AccessRecord
from kici.domain.errors import StoreDown
from kici.services.access_log import AccessLog
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.sim_clock import SIM_START
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual

ACT = AccessRecord(at=SIM_START, actor="alice", action="scaler.reload", target="local", outcome="allowed")


@virtual
async def test_what_was_done_can_be_read_newest_first() -> None:
    async with a_store() as store:
        access_log = AccessLog(store=store)
        for number in range(3):
            await access_log.record(AccessRecord(at=SIM_START, actor=f"a{number}", action="x", target="", outcome="ok"))
        rows = await access_log.read(before=None, limit=2)
        assert [row.actor for row in rows] == ["a2", "a1"]


@virtual
async def test_texts_from_outside_are_cut() -> None:
    async with a_store() as store:
        access_log = AccessLog(store=store)
        await access_log.record(
            AccessRecord(at=SIM_START, actor="a" * 5000, action="x", target="t" * 5000, outcome="ok", detail="d" * 5000)
        )
        (row,) = await access_log.read(before=None, limit=10)
        assert max(len(row.actor), len(row.target), len(row.detail)) <= 500


@virtual
async def test_an_outage_stops_nobody_and_leaves_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with a_store() as store:
        access_log = AccessLog(store=faulty(store, StoreFaults(is_down=True)))
        await access_log.record(ACT)
        (record,) = caplog.records
        assert record.getMessage() == "access.unrecorded"
        assert vars(record)["kici"]["actor"] == "alice"


@virtual
async def test_an_act_that_must_be_recorded_fails_in_an_outage() -> None:
    async with a_store() as store:
        access_log = AccessLog(store=faulty(store, StoreFaults(is_down=True)))
        with pytest.raises(StoreDown):
            await access_log.strictly(ACT)
