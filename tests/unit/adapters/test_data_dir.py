import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kici.adapters.data_dir import DataDir, default_data_dir
from kici.domain.errors import Conflict, Misconfigured
from kici.testing.seeded_entropy import SeededEntropy


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "/home/u/.local/state/kici"),
        ({"XDG_STATE_HOME": "/state"}, "/state/kici"),
        ({"XDG_STATE_HOME": "relative"}, "/home/u/.local/state/kici"),
        ({"KICI_DATA_DIR": "/data", "XDG_STATE_HOME": "/state"}, "/data"),
        ({"KICI_DATA_DIR": ""}, "/home/u/.local/state/kici"),
    ],
)
def test_the_default_place_follows_the_environment(environment: dict[str, str], expected: str) -> None:
    assert default_data_dir(environment, Path("/home/u")) == Path(expected)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_owner_may_look_into_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "data"
    data = DataDir.open(path)
    data.instance_id(SeededEntropy(1))
    data.secret_key(SeededEntropy(1))
    data.write_owner_token("kici_x")
    assert mode(path) == 0o700
    assert {file.name: mode(file) for file in path.iterdir()} == dict.fromkeys(
        ("lock", "instance-id", "secret-key", "owner-token"), 0o600
    )
    data.close()


def test_an_empty_folder_is_closed_to_others_but_a_strangers_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for path in (mine, theirs):
        path.mkdir()
        path.chmod(0o755)
    (theirs / "thesis.tex").touch()
    DataDir.open(mine).close()
    assert mode(mine) == 0o700
    with pytest.raises(Misconfigured, match="other users may look into it"):
        DataDir.open(theirs)
    assert mode(theirs) == 0o755


def test_identity_and_key_are_made_once(tmp_path: Path) -> None:
    first = DataDir.open(tmp_path)
    made = (first.instance_id(SeededEntropy(1)), first.secret_key(SeededEntropy(2)))
    first.close()
    second = DataDir.open(tmp_path)
    assert (second.instance_id(SeededEntropy(3)), second.secret_key(SeededEntropy(4))) == made
    assert len(made[1]) == 64
    second.close()


def test_the_owner_token_is_one_line_in_a_file_of_its_own(tmp_path: Path) -> None:
    data = DataDir.open(tmp_path)
    assert data.owner_token() is None
    data.write_owner_token("kici_abc")
    assert data.owner_token() == "kici_abc"
    assert (tmp_path / "owner-token").read_text() == "kici_abc\n"
    data.close()


def test_a_second_opening_is_refused_naming_the_first(tmp_path: Path) -> None:
    first = DataDir.open(tmp_path)
    with pytest.raises(Conflict, match=f"in use by process {os.getpid()} on .*; stop that one, or choose another"):
        DataDir.open(tmp_path)
    first.close()
    DataDir.open(tmp_path).close()


HOLDER = """
import sys, time
from pathlib import Path
from kici.adapters.data_dir import DataDir
data = DataDir.open(Path(sys.argv[1]))
import subprocess
child = subprocess.Popen(["sleep", "60"], close_fds=False)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_another_process_holds_it_until_it_dies_and_its_children_do_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(Conflict, match=f"process {holder.pid} "):
                DataDir.open(tmp_path)
            holder.kill()
            holder.wait()
            DataDir.open(tmp_path).close()
        finally:
            holder.kill()
            os.kill(child, 9)


def test_a_path_that_cannot_be_used_is_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match=r"cannot use .*file.*--data-dir"):
        DataDir.open(tmp_path / "file")
    data = DataDir.open(tmp_path / "data")
    (tmp_path / "data" / "instance-id").mkdir()
    with pytest.raises(Misconfigured, match="instance-id"):
        data.instance_id(SeededEntropy(1))
    (tmp_path / "data" / "owner-token").mkdir()
    with pytest.raises(Misconfigured, match="owner-token"):
        data.write_owner_token("x")
    data.close()
