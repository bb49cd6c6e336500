from kici.ports.entropy import Entropy
from kici.testing.seeded_entropy import SeededEntropy


def test_equal_seeds_give_equal_draws_and_other_seeds_others() -> None:
    one: Entropy = SeededEntropy(7)
    again, other = SeededEntropy(7), SeededEntropy(8)
    draws = (one.hex(8), one.bytes(4), one.uniform(0, 1))
    assert draws == (again.hex(8), again.bytes(4), again.uniform(0, 1))
    assert draws[0] != other.hex(8)


def test_draws_have_the_size_that_was_asked_for() -> None:
    entropy = SeededEntropy()
    assert len(entropy.hex(32)) == 64
    assert len(entropy.bytes(12)) == 12
    assert 3 <= entropy.uniform(3, 4) <= 4


def test_a_fork_is_not_moved_by_draws_elsewhere() -> None:
    quiet, busy = SeededEntropy(1), SeededEntropy(1)
    busy.hex(100)
    assert quiet.fork("store").hex(8) == busy.fork("store").hex(8)
    assert quiet.fork("store").hex(8) != quiet.fork("link").hex(8)


def test_chance_and_choice_follow_their_odds() -> None:
    entropy = SeededEntropy(3)
    assert not any(entropy.chance(0) for _ in range(100))
    assert all(entropy.chance(1) for _ in range(100))
    assert {entropy.choice("ab") for _ in range(100)} == {"a", "b"}
