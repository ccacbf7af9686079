from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.places import FairLock, Places
from tests.builders import HANG_S


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


async def test_s30_a_lock_goes_round_by_group() -> None:
    lock, order = FairLock(), list[str]()

    async def take(group: str, name: str) -> None:
        async with lock.hold(group):
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.timeout(HANG_S):
        async with lock.hold("flood"):
            flood = [asyncio.create_task(take("flood", f"flood {number}")) for number in range(3)]
            await asyncio.sleep(0)
            other = asyncio.create_task(take("other", "other"))
            await asyncio.sleep(0)
        await asyncio.gather(*flood, other)
        assert order == ["flood 0", "other", "flood 1", "flood 2"]
        async with lock.hold("flood"):  # it is free again
            pass


@pytest.mark.parametrize("is_its_turn", [False, True])
async def test_who_stops_waiting_for_a_lock_passes_it_on(is_its_turn: bool) -> None:
    lock = FairLock()

    async def take() -> None:
        async with lock.hold("a"):
            pass

    async with asyncio.timeout(HANG_S):
        async with lock.hold("a"):
            first, second = asyncio.create_task(take()), asyncio.create_task(take())
            await asyncio.sleep(0)
            if not is_its_turn:
                first.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert first.cancelled() and not second.cancelled()
        await take()
