"""The rotations and products of a layout, on plain slots, give W h for every size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from splitup_private.adapters.layout import SlotLayout, compute_coefficients

from splitup.core.errors import InvalidInput

SIZES = [
    *((1, 1, 8), (3, 1, 8), (8, 8, 8), (5, 3, 64), (64, 64, 64), (33, 7, 64), (17, 16, 256)),
    *((1536, 16, 4096), (256, 16, 4096), (4096, 64, 4096), (100, 64, 4096), (3000, 5, 4096)),
]


def multiply(
    layout: SlotLayout,
    slots: npt.NDArray[np.complex128],
    diagonals: list[npt.NDArray[np.complex128]],
) -> np.ndarray:
    """Do what ``Evaluation`` does to ciphertexts."""
    total = np.zeros(layout.slots, np.complex128)
    for start in reversed(range(0, len(diagonals), layout.babies)):
        total = np.roll(total, -layout.babies)
        for step, diagonal in enumerate(diagonals[start : start + layout.babies]):
            total += np.roll(slots, -step) * diagonal
    return total


@pytest.mark.parametrize(("width", "rank", "slots"), SIZES)
def test_slots_give_the_product(width: int, rank: int, slots: int) -> None:
    rng = np.random.default_rng(width)
    layout = SlotLayout(width, rank, slots)
    a, b = rng.normal(size=(rank, width)), rng.normal(size=(width, rank))
    hidden = rng.normal(size=width)
    found = multiply(layout, layout.pack(hidden) + 0j, layout.make_diagonals_a(a))
    for step in layout.sums:
        found = found + np.roll(found, -step)
    assert set(layout.sums) <= set(layout.steps)
    answer = multiply(layout, found, layout.make_diagonals_b(b))
    np.testing.assert_allclose(layout.unpack(answer.real), b @ (a @ hidden), atol=1e-9)


@pytest.mark.parametrize(("width", "rank", "slots"), [(5, 3, 64), (33, 7, 64), (300, 16, 1024)])
def test_no_coefficient_of_an_answer_is_above_the_bound(width: int, rank: int, slots: int) -> None:
    rng = np.random.default_rng(slots)
    layout = SlotLayout(width, rank, slots)
    b = rng.normal(size=(width, rank))
    bound = layout.compute_answer_bound(b)
    largest = 0.0
    for _ in range(300):
        u = rng.normal(size=2 * layout.rows)
        u[rank:] = 0
        u /= np.linalg.norm(u)
        rows = np.tile(u[: layout.rows] + 1j * u[layout.rows :], slots // layout.rows)
        answer = multiply(layout, rows, layout.make_diagonals_b(b))
        largest = max(largest, np.abs(compute_coefficients(answer)).max())
    assert bound / 4 < largest <= bound


def test_coefficients_are_those_of_the_polynomial() -> None:
    rng = np.random.default_rng(5)
    wanted = rng.normal(size=32)
    zeta = np.exp(1j * np.pi / 32)
    slots = [sum(c * zeta ** (k * 3**place) for k, c in enumerate(wanted)) for place in range(16)]
    np.testing.assert_allclose(compute_coefficients(np.array(slots)), wanted, atol=1e-6)


@pytest.mark.parametrize(("width", "rank"), [(0, 1), (65, 1), (8, 0), (8, 9), (64, 65)])
def test_sizes_out_of_bounds_are_refused(width: int, rank: int) -> None:
    with pytest.raises(InvalidInput, match="cannot be applied"):
        SlotLayout(width, rank, 64)
