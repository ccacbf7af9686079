"""Where hidden states and weights lie in the slots of ciphertexts, and which rotations follow.

The product with A [rank, width] and the one with B [width, rank] are sums over diagonals of
rotated slots (Halevi and Shoup, "Algorithms in HElib", 2014), grouped into baby and giant steps.
Three means keep the rotations, which cost nearly all of the time, few:

- Two rows of A make one complex row, and two columns of B one complex column, of which the client
  takes the real part: Re((b0 - i b1) · ((a0 + i a1) h)) = b0 a0 h + b1 a1 h.
- The slots hold several copies of the hidden state, each moved on by as many places as a copy has
  diagonals, so that one product covers a diagonal per copy.
- The client adds up the copies of the answer.

    period    the power of two from ``width`` on;      copies     slots / period
    rows      the power of two from rank / 2 on;       diagonals  rows / copies, at least 1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup_private.adapters.messages import AdapterInfo
from splitup_private.adapters.parameters import MAX_RANK

Floats = npt.NDArray[np.float64]
Complexes = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class SlotLayout:
    """The places of a hidden state of ``width`` elements and of weights of ``rank`` in slots."""

    width: int
    rank: int
    slots: int

    def __post_init__(self) -> None:
        if not (1 <= self.width <= self.slots and 1 <= self.rank <= min(self.width, MAX_RANK)):
            raise InvalidInput(
                f"an adapter of rank {self.rank} for {self.width} elements cannot be applied: the "
                f"rank is 1 to {MAX_RANK} and not above the width, the width at most {self.slots}"
            )

    @property
    def period(self) -> int:
        """Return the slots of one copy."""
        return _round_up(self.width)

    @property
    def rows(self) -> int:
        """Return the complex rows of A."""
        return _round_up(-(-self.rank // 2))

    @property
    def copies(self) -> int:
        """Return the copies that are used."""
        return min(self.slots // self.period, self.rows)

    @property
    def diagonals(self) -> int:
        """Return the diagonals of a copy."""
        return self.rows // self.copies

    @property
    def babies(self) -> int:
        """Return the diagonals whose products are added before a giant step."""
        return 1 << (self.diagonals.bit_length() - 1) // 2

    @property
    def sums(self) -> tuple[int, ...]:
        """Return the rotations that add up all slots of a row."""
        return tuple(
            self.rows << place for place in range((self.slots // self.rows).bit_length() - 1)
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Return all rotations, in slots; each needs a key."""
        steps = {1} if self.babies > 1 else set()
        if self.diagonals > self.babies:
            steps.add(self.babies)
        return tuple(sorted({*steps, *self.sums}))

    @cached_property
    def _places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the copy of each slot and its place in there."""
        return np.divmod(np.arange(self.slots), self.period)

    @cached_property
    def _given(self) -> npt.NDArray[np.int64]:
        """Return the element of the hidden state in each slot; ``width`` where there is none."""
        copy, place = self._places
        element = (place + copy * self.diagonals) % self.period
        return np.where((copy < self.copies) & (element < self.width), element, self.width)

    @cached_property
    def _answered(self) -> npt.NDArray[np.int64]:
        """Return the element of the answer in each slot; ``width`` where there is none."""
        copy, place = self._places
        element = (place - copy * self.diagonals) % self.period
        return np.where((copy < self.copies) & (element < self.width), element, self.width)

    def pack(self, hidden: Floats) -> Floats:
        """Return the slots of a hidden state [width]."""
        return np.append(hidden, 0.0)[self._given]

    def unpack(self, slots: Floats) -> Floats:
        """Return the answer [width] in decrypted slots."""
        sums = np.zeros(self.width + 1)
        np.add.at(sums, self._answered, slots)
        return sums[: self.width]

    def make_diagonals_a(self, a: Floats) -> list[Complexes]:
        """Return the plaintexts for A [rank, width], by diagonal, moved for their giant steps."""
        rows = np.zeros((2 * self.rows, self.width + 1))
        rows[: self.rank, : self.width] = a
        table = rows[: self.rows] + 1j * rows[self.rows :]
        slot = np.arange(self.slots)
        used = self._places[0] < self.copies
        made = [
            np.where(used, table[slot % self.rows, np.roll(self._given, -step)], 0)
            for step in range(self.diagonals)
        ]
        return self._move(made)

    def make_diagonals_b(self, b: Floats) -> list[Complexes]:
        """Return the plaintexts for B [width, rank], by diagonal, moved for their giant steps."""
        return self._move(self._make_plain_b(b))

    def compute_answer_bound(self, b: Floats) -> float:
        """Return the largest coefficient of an answer's polynomial at scale 1, for |A h| = 1.

        The polynomial is linear in A h. So every coefficient is at most the length of its row of
        that linear map, which is computed here.
        """
        diagonals = self._make_plain_b(b)
        slot = np.arange(self.slots)
        squares = np.zeros(2 * self.slots)
        for row in range(self.rows):
            image = np.zeros(self.slots, np.complex128)
            for step, weights in enumerate(diagonals):
                image += np.where((slot + step) % self.rows == row, weights, 0)
            for unit in (1, 1j):
                squares += compute_coefficients(unit * image) ** 2
        return float(np.sqrt(squares.max()))

    def _make_plain_b(self, b: Floats) -> list[Complexes]:
        columns = np.zeros((self.width + 1, 2 * self.rows))
        columns[: self.width, : self.rank] = b
        table = columns[:, : self.rows] - 1j * columns[:, self.rows :]
        slot = np.arange(self.slots)
        return [table[self._answered, (slot + step) % self.rows] for step in range(self.diagonals)]

    def _move(self, diagonals: list[Complexes]) -> list[Complexes]:
        return [np.roll(values, step - step % self.babies) for step, values in enumerate(diagonals)]


def get_layout(info: AdapterInfo) -> SlotLayout:
    """Return where hidden states lie in the slots for an adapter; raise InvalidInput."""
    return SlotLayout(info.width, info.rank, info.parameters.degree // 2)


def compute_coefficients(slots: Complexes) -> Floats:
    """Return the real coefficients of the polynomial that encodes complex slots at scale 1.

    Slot j is its value at zeta^(3^j), with zeta = exp(i pi / N) and N twice the number of slots.
    """
    degree = 2 * len(slots)
    powers = np.empty(len(slots), np.int64)
    power = 1
    for place in range(len(slots)):
        powers[place] = power
        power = power * 3 % (2 * degree)
    values = np.zeros(degree, np.complex128)
    values[(powers - 1) // 2] = slots
    values[(2 * degree - powers - 1) // 2] = slots.conj()
    turned = np.fft.fft(values) / degree
    return np.asarray((turned * np.exp(-1j * np.pi * np.arange(degree) / degree)).real)


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
