"""CKKS parameters: which are used, and the check that they are safe.

    degree N    8,192, or 16,384 for hidden states of more than 4,096 elements; N / 2 slots
    primes      60, 40 and 60 bits. A ciphertext starts under the first two and is rescaled to the
                first one; the last one serves the keys of rotations alone
    scale       2^40 for a hidden state, 2^58 for an answer

Both sides compute the parameters from the width of the hidden state, and refuse others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from splitup.core.errors import InvalidInput, PeerFault
from splitup_private.adapters.messages import CkksParameters

PRIME_BITS: Final = (60, 40, 60)
INPUT_SCALE: Final = 2.0**40
ANSWER_BITS: Final = 58  # an answer's polynomial stays below half of its prime of 60 bits
ANSWER_SCALE: Final = 2.0**ANSWER_BITS
MAX_WIDTH: Final = 8_192
MAX_RANK: Final = 64
_DEGREES: Final = (8_192, 16_384)
# Most bits of all primes together for 128 bits of security against classical computers, with a
# ternary secret: Homomorphic Encryption Standard (2018), table 1.
_MAX_MODULUS_BITS: Final[Mapping[int, int]] = MappingProxyType(
    {1_024: 27, 2_048: 54, 4_096: 109, 8_192: 218, 16_384: 438, 32_768: 881}
)


def choose_parameters(width: int) -> CkksParameters:
    """Return the parameters for hidden states of this many elements; raise InvalidInput."""
    for degree in _DEGREES:
        if 1 <= width <= degree // 2:
            return CkksParameters(degree=degree, prime_bits=PRIME_BITS)
    raise InvalidInput(f"a hidden state of {width} elements is no 1 to {MAX_WIDTH} elements long")


def check_security(parameters: CkksParameters) -> None:
    """Raise PeerFault unless parameters give 128 bits of security."""
    most = _MAX_MODULUS_BITS.get(parameters.degree, 0)
    bits = sum(parameters.prime_bits)
    if bits > most:
        raise PeerFault(
            f"CKKS parameters of degree {parameters.degree} with a modulus of {bits} bits give "
            f"less than 128 bits of security; at most {most} bits are safe"
        )


def check_parameters(parameters: CkksParameters, width: int) -> None:
    """Raise PeerFault unless these are safe, and those for hidden states of this width."""
    check_security(parameters)
    wanted = choose_parameters(width)
    if parameters != wanted:
        raise PeerFault(
            f"CKKS parameters of degree {parameters.degree} with primes of "
            f"{list(parameters.prime_bits)} bits are not those for hidden states of {width} "
            f"elements: degree {wanted.degree}, {list(wanted.prime_bits)} bits"
        )
