"""What could be right: before, while and after a change, and when one failed."""

from __future__ import annotations

from tests.chaos.truth import ABSENT, Truth


def test_a_change_under_way() -> None:
    """Both may be right until it is acknowledged, and the old one for the grace period after that."""
    truth = Truth(grace_s=2)
    truth.begin("n", {"w1"}, now=10)
    assert truth.could_be("n", 9, 9.5) == {ABSENT}
    assert truth.could_be("n", 9, 11) == {ABSENT, "w1"}
    truth.acknowledge("n", now=12)
    assert truth.could_be("n", 13.9, 14) == {ABSENT, "w1"}
    assert truth.could_be("n", 14.1, 15) == {"w1"}


def test_one_that_failed() -> None:
    """It may have happened until the next one is acknowledged."""
    truth = Truth(grace_s=0)
    truth.begin("n", {"w1"}, now=1)
    truth.acknowledge("n", now=2)
    truth.begin("n", {"w2"}, now=3)  # fails
    assert truth.could_be("n", 100, 101) == {"w1", "w2"}
    truth.begin("n", {ABSENT}, now=102)
    truth.acknowledge("n", now=103)
    assert truth.could_be("n", 104, 105) == {ABSENT}


def test_how_old_an_answer_is() -> None:
    """It counts from the acknowledgement of what replaced it, not from the end of the grace period."""
    truth = Truth(grace_s=5)
    truth.begin("n", {"w1"}, now=0)
    truth.acknowledge("n", now=1)
    truth.begin("n", {"w2"}, now=10)
    truth.acknowledge("n", now=11)
    assert truth.age_s("n", "w1", since=12.5) == 1.5
    assert truth.age_s("n", "w1", since=10.5) == 0
    assert truth.age_s("n", "w2", since=50) == 0
