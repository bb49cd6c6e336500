"""The sealer: AES-256-GCM, a fresh nonce for each value, the place as additional data.

Sealed bytes are: one byte of format, the nonce, the ciphertext with its tag.  The library is imported when the
first sealer is made: most commands never need it.
"""

import hashlib
import re
from typing import Final

from kici.domain.errors import Misconfigured
from kici.ports.entropy import Entropy
from kici.ports.sealer import Unreadable

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_FORMAT: Final = b"\x01"
_HEX_KEY: Final = re.compile(r"[0-9a-fA-F]{64}\Z")


def parse_key(text: str, *, source: str) -> bytes:
    """The key from its 64 hex digits.  Raises `Misconfigured` naming `source` and never what it holds."""
    if not _HEX_KEY.match(text.strip()):
        raise Misconfigured(
            f"the secret key in {source} is not 64 hex digits; `openssl rand -hex 32` makes one, "
            "but secrets that were stored under another key need that one back"
        )
    return bytes.fromhex(text.strip())


class AesGcmSealer:
    """Contract: `ports.sealer.Sealer`."""

    def __init__(self, key: bytes, entropy: Entropy, *, former: bytes | None = None) -> None:
        """`former`: the key before this one, which opens and never seals."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert len(key) == KEY_BYTES
        self._cipher = AESGCM(key)
        self._former = None if former is None or former == key else AesGcmSealer(former, entropy)
        self._invalid = InvalidTag
        self._entropy = entropy
        self._fingerprint = hashlib.sha256(b"kici secret key fingerprint\0" + key).hexdigest()[:32]

    @property
    def key_version(self) -> int:
        return 1

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def former_fingerprint(self) -> str | None:
        return None if self._former is None else self._former.fingerprint

    def seal(self, plain: bytes, *, place: str) -> bytes:
        nonce = self._entropy.bytes(_NONCE_BYTES)
        return _FORMAT + nonce + self._cipher.encrypt(nonce, plain, place.encode())

    def open(self, sealed: bytes, *, place: str) -> bytes:
        try:
            return self._open(sealed, place)
        except Unreadable:
            if self._former is None:
                raise
            return self._former.open(sealed, place=place)

    def reseal(self, sealed: bytes, *, place: str) -> bytes | None:
        try:
            _ = self._open(sealed, place)
        except Unreadable:
            return self.seal(self.open(sealed, place=place), place=place)
        return None

    def _open(self, sealed: bytes, place: str) -> bytes:
        if sealed[:1] != _FORMAT or len(sealed) <= _NONCE_BYTES:
            raise Unreadable(f"what is sealed for {place} has an unknown format; was it written by a newer release?")
        nonce, ciphertext = sealed[1 : _NONCE_BYTES + 1], sealed[_NONCE_BYTES + 1 :]
        try:
            return self._cipher.decrypt(nonce, ciphertext, place.encode())
        except self._invalid:
            raise Unreadable(
                f"what is sealed for {place} does not open: it was sealed with another key, moved or damaged"
            ) from None
