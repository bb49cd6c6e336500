from hypothesis import given
from hypothesis import strategies as st

from kici.domain.ids import Instant
from kici.observe.story import Stories

NOON = Instant(1_750_075_200_123)


def test_a_story_keeps_the_last_moves_in_order() -> None:
    stories = Stories(moves_max=3)
    for number in range(5):
        stories.tell("job-1", f"move {number}", at=Instant(NOON + number))
    assert [told.what for told in stories.story("job-1")] == ["move 2", "move 3", "move 4"]


def test_its_text_says_when_and_what() -> None:
    stories = Stories()
    stories.tell("job-1", "queued: no agent fits", at=NOON)
    assert stories.text("job-1") == "story of job-1:\n  12:00:00.123 queued: no agent fits"
    assert "nothing is known" in stories.text("job-2")


def test_the_object_that_was_longest_without_a_move_is_forgotten_first() -> None:
    stories = Stories(objects_max=2)
    stories.tell("a", "1", at=NOON)
    stories.tell("b", "1", at=NOON)
    stories.tell("a", "2", at=NOON)
    stories.tell("c", "1", at=NOON)
    assert stories.story("b") == ()
    assert len(stories.story("a")) == 2


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.text(max_size=500)), max_size=60))
def test_memory_is_bounded_whatever_is_told(moves: list[tuple[str, str]]) -> None:
    stories = Stories(moves_max=4, objects_max=3)
    for object_id, what in moves:
        stories.tell(object_id, what, at=NOON)
    known = [object_id for object_id in "abcdef" if stories.story(object_id)]
    assert len(known) <= 3
    assert all(len(stories.story(object_id)) <= 4 for object_id in known)
    assert all(len(told.what) <= 300 for object_id in known for told in stories.story(object_id))
    if moves:
        assert stories.story(moves[-1][0])[-1].what == moves[-1][1][:300]
