from __future__ import annotations

import numpy as np
import pytest

from splitup.client.inputs import (
    check_execution_id,
    format_share,
    format_usdc,
    parse_share,
    parse_usdc,
    split_steps,
)
from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec

SPECS = (TensorSpec("x", "float32", (2,)), TensorSpec("n", "int32", ()))


def arrays(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((*shape, 2), np.float32), "n": np.zeros(shape, np.int32)}


def test_arrays_of_the_ports_shape_are_one_step() -> None:
    steps = split_steps(SPECS, arrays())
    assert (len(steps.rows), steps.stacked) == (1, False)


def test_leading_axis_is_steps() -> None:
    given = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "n": np.arange(3, dtype=np.int32)}
    steps = split_steps(SPECS, given)
    assert (len(steps.rows), steps.stacked) == (3, True)
    assert steps.rows[2]["x"].tolist() == [4.0, 5.0]
    assert int(steps.rows[1]["n"]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((3, 2), np.float64)}, "'x' has dtype float64"),
        ({"x": np.zeros((3, 5), np.float32)}, "'x' has shape"),
        ({"x": np.zeros((4, 2), np.float32)}, "the same number of steps"),
        ({"x": np.zeros((2,), np.float32)}, "has none"),
        ({"x": None}, "'x' is missing"),
        ({"y": np.zeros(3, np.float32)}, "no input 'y'"),
        ({"x": np.zeros((0, 2), np.float32), "n": np.zeros(0, np.int32)}, "has 0 steps"),
    ],
)
def test_first_input_that_does_not_fit_is_named(
    change: dict[str, np.ndarray | None], message: str
) -> None:
    given = {k: v for k, v in {**arrays(3), **change}.items() if v is not None}
    with pytest.raises(InvalidInput, match=message):
        split_steps(SPECS, given)


@pytest.mark.parametrize(
    ("given", "micro"), [(0.25, 250_000), ("1", 1_000_000), (0, 0), (0.1, 100_000)]
)
def test_amounts_are_exact(given: float | str, micro: int) -> None:
    assert parse_usdc(given, name="price") == micro


@pytest.mark.parametrize("given", ["", "much", -1, float("nan"), float("inf"), 1e12, "0.0000001"])
def test_senseless_amounts_are_refused(given: float | str) -> None:
    with pytest.raises(InvalidInput, match="price is"):
        parse_usdc(given, name="price")


def test_amounts_are_written_as_people_do() -> None:
    written = [format_usdc(micro) for micro in (0, 1, 250_000, 1_000_000_000)]
    assert written == ["0 USDC", "0.000001 USDC", "0.25 USDC", "1,000 USDC"]


@pytest.mark.parametrize(
    "text", ["0x7d9e", "", "7d" * 32, "0x" + "7D" * 32, "0x" + "7d" * 32 + "\n"]
)
def test_what_is_no_execution_id_is_refused_at_once(text: str) -> None:
    with pytest.raises(InvalidInput, match="no id of an execution"):
        check_execution_id(text)
    check_execution_id("0x" + "7d" * 32)


@pytest.mark.parametrize(
    "given, bps", [("50%", 5_000), (0.5, 5_000), ("8.25 %", 825), (1, 10_000), ("0.01%", 1)]
)
def test_shares_are_percents_or_fractions(given: float | str, bps: int) -> None:
    assert parse_share(given) == bps
    assert parse_share(format_share(bps)) == bps


@pytest.mark.parametrize("given", [0, -0.1, 1.01, 50, "101%", "0.001%", "nan", "inf", "half", ""])
def test_other_shares_are_refused(given: float | str) -> None:
    with pytest.raises(InvalidInput, match="give up to 100%"):
        parse_share(given)
