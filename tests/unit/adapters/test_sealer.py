import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.adapters.sealer import AesGcmSealer, parse_key
from kici.domain.errors import Misconfigured
from kici.ports.sealer import Sealer, Unreadable
from kici.testing.seeded_entropy import SeededEntropy


def sealer(key: bytes = b"k" * 32, seed: int = 1) -> Sealer:
    return AesGcmSealer(key, SeededEntropy(seed))


@given(plain=st.binary(max_size=200), place=st.text(max_size=50))
def test_what_was_sealed_opens_at_its_place(plain: bytes, place: str) -> None:
    one = sealer()
    assert one.open(one.seal(plain, place=place), place=place) == plain


@given(plain=st.binary(max_size=50), data=st.data())
def test_any_changed_byte_makes_it_unreadable(plain: bytes, data: st.DataObject) -> None:
    one = sealer()
    sealed = bytearray(one.seal(plain, place="here"))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Unreadable):
        one.open(bytes(sealed), place="here")


def test_another_place_another_key_and_scraps_do_not_open() -> None:
    sealed = sealer().seal(b"value", place="org:context:key")
    with pytest.raises(Unreadable, match="org:context:other"):
        sealer().open(sealed, place="org:context:other")
    with pytest.raises(Unreadable):
        sealer(b"x" * 32).open(sealed, place="org:context:key")
    for scrap in (b"", sealed[:5], sealed[:13], b"\x02" + sealed[1:]):
        with pytest.raises(Unreadable):
            sealer().open(scrap, place="org:context:key")


def test_equal_values_do_not_look_alike() -> None:
    one = sealer()
    assert one.seal(b"value", place="p") != one.seal(b"value", place="p")


def test_fingerprints_tell_keys_apart_and_do_not_contain_them() -> None:
    assert sealer(seed=1).fingerprint == sealer(seed=2).fingerprint
    assert sealer(b"x" * 32).fingerprint != sealer().fingerprint
    assert (b"k" * 32).hex() not in sealer().fingerprint


def test_a_key_is_64_hex_digits_and_is_never_shown() -> None:
    assert parse_key("ab" * 32 + "\n", source="KICI_SECRET_KEY") == b"\xab" * 32
    for wrong in ("ab" * 31, "ab" * 33, "zz" * 32, ""):
        with pytest.raises(Misconfigured, match="KICI_SECRET_KEY is not 64 hex digits") as error:
            parse_key(wrong, source="KICI_SECRET_KEY")
        assert not wrong or wrong not in str(error.value)


def test_the_library_is_not_loaded_before_it_is_needed() -> None:
    program = "import sys, kici.adapters.sealer; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


def test_the_former_key_opens_and_never_seals() -> None:
    old = sealer(b"o" * 32)
    turning = AesGcmSealer(b"n" * 32, SeededEntropy(2), former=b"o" * 32)
    assert turning.former_fingerprint == old.fingerprint != turning.fingerprint
    sealed = old.seal(b"value", place="here")
    assert turning.open(sealed, place="here") == b"value"
    again = turning.reseal(sealed, place="here")
    assert again is not None
    assert sealer(b"n" * 32).open(again, place="here") == b"value"
    assert turning.reseal(again, place="here") is None
    for action in (turning.open, turning.reseal):
        with pytest.raises(Unreadable):
            action(sealed, place="there")
    assert AesGcmSealer(b"n" * 32, SeededEntropy(2), former=b"n" * 32).former_fingerprint is None
