"""Parameters are those of the standard's table, on both sides."""

from __future__ import annotations

import pytest
from splitup_private.adapters.ckks import ClientKeys
from splitup_private.adapters.messages import CkksParameters
from splitup_private.adapters.parameters import check_parameters, check_security, choose_parameters

from splitup.core.errors import InvalidInput, PeerFault


@pytest.mark.parametrize(
    ("width", "degree"), [(1, 8192), (1536, 8192), (4096, 8192), (4097, 16384), (8192, 16384)]
)
def test_every_choice_is_safe(width: int, degree: int) -> None:
    parameters = choose_parameters(width)
    assert parameters.degree == degree
    check_parameters(parameters, width)


@pytest.mark.parametrize("width", [0, -1, 8193])
def test_widths_without_parameters_are_refused(width: int) -> None:
    with pytest.raises(InvalidInput, match="no 1 to 8192 elements"):
        choose_parameters(width)


@pytest.mark.parametrize(
    ("degree", "bits"),
    [(4096, (60, 40, 60)), (8192, (60, 60, 60, 60)), (1000, (30,)), (65536, (60, 40, 60))],
)
def test_unsafe_parameters_are_refused(degree: int, bits: tuple[int, ...]) -> None:
    parameters = CkksParameters(degree=degree, prime_bits=bits)
    with pytest.raises(PeerFault, match="less than 128 bits of security"):
        check_security(parameters)
    with pytest.raises(PeerFault, match="less than 128 bits of security"):
        ClientKeys(parameters)


def test_safe_parameters_that_are_not_expected_are_refused() -> None:
    check_security(other := CkksParameters(degree=8192, prime_bits=(50, 40, 50)))
    with pytest.raises(PeerFault, match="are not those for hidden states of 1536 elements"):
        check_parameters(other, 1536)
    with pytest.raises(PeerFault, match="are not those"):
        check_parameters(choose_parameters(8192), 1536)
