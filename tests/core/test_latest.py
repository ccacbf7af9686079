"""A dictionary forgets what was set longest ago."""

from splitup.core.latest import Latest


def test_the_entry_that_was_set_longest_ago_makes_room() -> None:
    latest: Latest[str, int] = Latest(2)
    latest["a"], latest["b"] = 1, 2
    latest["a"] = 3
    latest["c"] = 4
    assert list(latest.items()) == [("a", 3), ("c", 4)]


def test_a_value_that_is_read_or_found_by_default_stays_in_its_place() -> None:
    latest: Latest[str, int] = Latest(2)
    assert latest.setdefault("a", 1) == 1
    latest["b"] = 2
    assert latest["a"] == latest.setdefault("a", 9) == 1
    latest["c"] = 3
    assert list(latest) == ["b", "c"]
    latest.update(d=4)
    assert list(latest) == ["c", "d"]
