"""What a worker keeps of its right to be one: a credential in its data directory, and the token that it was given."""

from pathlib import Path
from typing import Final

from kici.adapters.data_dir import DataDir
from kici.domain.errors import Misconfigured
from kici.domain.worker import read_join_token

_TOKEN_BYTES_MAX: Final = 4096


class FileWorkerKeys:
    """Implements `ports.workers.WorkerKeys`."""

    def __init__(self, data_dir: DataDir, join_token: str | None) -> None:
        self._data_dir = data_dir
        self._join_token = join_token
        self._credential = data_dir.worker_credential()

    def credential(self) -> str | None:
        return self._credential

    def keep(self, credential: str | None) -> None:
        self._data_dir.keep_worker_credential(credential)
        self._credential = credential

    def join_token(self) -> str | None:
        return self._join_token


def read_token_file(path: Path) -> str:
    """The one line of a token file.  Raises `Misconfigured`."""
    try:
        with path.open(encoding="utf-8") as file:
            token = file.readline(_TOKEN_BYTES_MAX).strip()
        read_join_token(token)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Misconfigured(
            f"cannot use the join token in {path}: {error}; kici-admin join-token create makes one"
        ) from error
    return token
