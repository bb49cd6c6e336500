import pytest

from kici.decide.redrive import PER_CLASS_MAX, Redrive, Waiting
from kici.domain.ids import ClassId, JobId


def queue(class_id: int, *seqs: int) -> list[Waiting]:
    return [Waiting(seq=seq, job_id=JobId(f"job-{seq}"), class_id=ClassId(class_id)) for seq in seqs]


def test_the_oldest_job_of_all_classes_is_offered_first() -> None:
    assert [waiting.seq for waiting in Redrive([queue(1, 2, 5), queue(2, 1, 9), queue(3, 4)])] == [1, 2, 4, 5, 9]


@pytest.mark.spec("T1.11", "scaler 41.4.5")
def test_the_ten_oldest_of_each_class_are_offered() -> None:
    offered = [waiting.seq for waiting in Redrive([queue(1, *range(30)), queue(2, *range(100, 103))])]
    assert offered == [*range(PER_CLASS_MAX), 100, 101, 102]


def test_a_refused_class_is_out_for_the_rest_of_the_pass_and_keeps_no_other_waiting() -> None:
    a_pass = Redrive([queue(1, *range(0, 20, 2)), queue(2, 1, 3)])
    offered = []
    for waiting in a_pass:
        offered.append(waiting.seq)
        if waiting.class_id == 1:
            a_pass.refuse(waiting.class_id)
    assert offered == [0, 1, 3]
