"""For how long something has been seen at every look."""

from kici.kit.unbroken import Unbroken


def test_one_look_without_it_starts_it_anew() -> None:
    unbroken = Unbroken[str]()
    assert unbroken.look("ab", now=0.0, seconds=10.0) == set()
    assert unbroken.look("ab", now=9.9, seconds=10.0) == set()
    assert unbroken.look("ab", now=10.0, seconds=10.0) == {"a", "b"}
    assert unbroken.look("a", now=11.0, seconds=10.0) == {"a"}
    assert unbroken.look("ab", now=12.0, seconds=10.0) == {"a"}


def test_what_is_forgotten_starts_anew() -> None:
    unbroken = Unbroken[str]()
    unbroken.look("a", now=0.0, seconds=10.0)
    unbroken.forget()
    assert unbroken.look("a", now=11.0, seconds=10.0) == set()
    assert unbroken.look("a", now=21.0, seconds=10.0) == {"a"}
