"""Files that go along with a job that builds its image."""

from pathlib import Path
from typing import Any

import pytest

from kici.cli.build_files import BYTES_MAX, build_files, with_files
from kici.cli.errors import CliError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "ci/Dockerfile": "FROM a\nCOPY src requirements.txt /src/\n",
        "src/app.py": "print()\n",
        "src/deep/b.py": "",
        "src/.git/config": "",
        "requirements.txt": "x\n",
        "other": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_dockerfile_goes_with_what_it_copies(folder: Path) -> None:
    assert build_files(folder, "ci/Dockerfile") == {
        "ci/Dockerfile": "FROM a\nCOPY src requirements.txt /src/\n",
        "src/app.py": "print()\n",
        "src/deep/b.py": "",
        "requirements.txt": "x\n",
    }


def test_a_run_file_is_completed_where_it_brings_no_files_itself(folder: Path) -> None:
    document: Any = {
        "jobs": {
            "builds": {"container": {"dockerfile": "ci/Dockerfile"}},
            "brings": {"container": {"dockerfile": "D", "context": {"D": "FROM a"}}},
            "image": {"container": "debian"},
            "odd": [],
        }
    }
    assert with_files(document, folder) == document  # completed in place
    assert "requirements.txt" in document["jobs"]["builds"]["container"]["context"]
    assert document["jobs"]["brings"]["container"]["context"] == {"D": "FROM a"}
    odd: list[object] = [None, [], {"jobs": 5}, {"jobs": {"a": {"container": {"dockerfile": 5}}}}]
    for strange in odd:
        assert with_files(strange, folder) is strange


@pytest.mark.parametrize(
    ("dockerfile", "told"),
    [
        ("FROM a\nCOPY picture /\n", "picture is no text"),
        ("FROM a\nCOPY big /\n", f"{BYTES_MAX} go with a job"),
        ("FROM a\nCOPY away /\n", "leads out of"),
    ],
)
def test_what_cannot_go_along_is_said(folder: Path, dockerfile: str, told: str) -> None:
    (folder / "picture").write_bytes(b"\xff\x00")
    (folder / "big").write_text("x" * BYTES_MAX)
    (folder / "away").symlink_to("/etc/hostname")
    (folder / "Dockerfile").write_text(dockerfile)
    with pytest.raises(CliError, match=told):
        _ = build_files(folder, "Dockerfile")


def test_a_dockerfile_that_is_not_there_is_said(folder: Path) -> None:
    with pytest.raises(CliError, match=r"Dockerfile.*No such file"):
        _ = build_files(folder, "Dockerfile")


def test_what_a_dockerfile_copies_in_vain_is_left_to_the_engine(folder: Path) -> None:
    (folder / "Dockerfile").write_text("FROM a\nCOPY nothing ../outside /\n")
    assert list(build_files(folder, "Dockerfile")) == ["Dockerfile"]
