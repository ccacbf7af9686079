from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitup.core.places import Places


def test_while_there_is_room_everybody_gets_a_place() -> None:
    places: Places[int] = Places(3)
    assert [places.take("a", number) for number in range(3)] == [None] * 3
    places.leave("a", 1)
    places.leave("a", 1)  # again, and of a group that holds nothing
    places.leave("b", 1)
    assert len(places) == 2
    assert places.take("b", 9) is None


def test_the_newest_of_the_largest_group_goes_first() -> None:
    places: Places[int] = Places(4)
    for number in range(4):
        places.take("flood", number)
    assert places.take("flood", 4) == ("flood", 4)
    assert places.take("honest", 5) == ("flood", 3)
    assert places.take("honest", 6) == ("flood", 2)
    assert places.take("honest", 7) == ("honest", 7)  # three against one
    assert places.take("third", 8) == ("flood", 1)
    assert len(places) == 4


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 99)), unique=True))
def test_no_group_is_pushed_below_its_equal_share(newcomers: list[tuple[str, int]]) -> None:
    places: Places[int] = Places(10)
    held: dict[str, set[int]] = {}
    for group, holder in newcomers:
        shed = places.take(group, holder)
        held.setdefault(group, set()).add(holder)
        if shed is not None:
            held[shed[0]].remove(shed[1])
            assert len(held[shed[0]]) >= 10 // 5 or shed == (group, holder)
        assert len(places) == sum(map(len, held.values())) <= 10
