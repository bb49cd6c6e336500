"""Records of containers: who answers for them, also across processes that die."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kici.adapters.job_records import JobRecords
from kici.domain.errors import Permanent

ENGINE = "unix:///run/docker.sock"
HOLD = """
import sys
from pathlib import Path
from kici.adapters.job_records import JobRecords
with JobRecords(Path(sys.argv[1])).held("kici-job-1", "unix:///run/docker.sock"):
    print("held", flush=True)
    sys.stdin.read()
"""


def stale(records: JobRecords) -> list[tuple[str, str]]:
    with records.stale() as found:
        return found


def test_a_container_is_stale_once_its_process_is_dead(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "records")
    argv = [sys.executable, "-c", HOLD, str(records.folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert stale(records) == []
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert stale(records) == [("kici-job-1", ENGINE)]
    records.forget("kici-job-1")
    assert stale(records) == []


def test_what_one_clears_up_no_other_does(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "records")
    with records.held("kici-job-1", ENGINE):
        pass
    with records.stale() as mine:
        assert mine == [("kici-job-1", ENGINE)]
        assert stale(records) == []


def test_a_record_that_was_not_finished_is_nobodys(tmp_path: Path) -> None:
    """Its container cannot exist yet."""
    records = JobRecords(tmp_path / "records")
    (records.folder / "containers" / "kici-job-1").write_text("")
    assert stale(records) == []


def test_a_lock_is_one_holders_at_a_time(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "records")
    locks = [records.take(name) for name in ("build", "build", "another")]
    assert [lock is not None for lock in locks] == [True, False, True]
    for lock in filter(None, locks):
        os.close(lock)
    again = records.take("build")
    assert again is not None
    os.close(again)


def test_locks_that_nobody_wants_any_more_go(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "records")
    handles = [records.take(name) for name in ("held", "old", "new")]
    for handle in handles[1:]:
        assert handle is not None
        os.close(handle)
    for name in ("held", "old"):
        os.utime(records.folder / "locks" / name, (0, 0))
    records.drop_old_locks(older_than_hours=1)
    assert sorted(path.name for path in (records.folder / "locks").iterdir()) == ["held", "new"]
    assert handles[0] is not None
    os.close(handles[0])


def test_what_is_remembered_is_there_for_others(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "records")
    assert records.recall("key") is None
    records.remember("key", b"value")
    assert JobRecords(tmp_path / "records").recall("key") == b"value"
    records.remember("key", None)
    assert records.recall("key") is None


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Permanent, match="cannot keep records of containers"):
        JobRecords(folder)
