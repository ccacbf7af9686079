"""A traced tinygrad graph becomes a graph of the format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from splitup.backend.compiler.trace_reading import Placeholder, read_tensors
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.rules import check_graph


@pytest.fixture(autouse=True)
def python_device() -> Iterator[None]:
    """Put what the tests name no device for where nothing has to be compiled."""
    with Context(DEV="PYTHON"):
        yield


def read(tensor: Tensor, **buffers: Tensor) -> object:
    specs, places = [], {}
    for index, (name, buffer) in enumerate(buffers.items()):
        specs.append(TensorSpec(name, "float32", tuple(buffer.shape)))
        places[buffer.uop.base] = Placeholder("INPUT", index, "float32", tuple(buffer.shape))
    return read_tensors(
        inputs=specs,
        weights=(),
        states=(),
        placeholders=places,
        labels={},
        outputs=[("y", tensor.contiguous().uop)],
        updates=(),
    )[0]


def test_python_numbers_take_the_dtype_they_are_used_with() -> None:
    x = Tensor.empty(2, 3)
    graph = read((x * 2 + 0.1 > 1).where(x, 3).cast(dtypes.float16) * 0.1, x=x)
    values = check_graph(graph).values  # type: ignore[arg-type]
    assert values[-1].dtype == "float16"
    assert {n.dtype for n in graph.nodes} <= {"float32", "float16", "bool"}  # type: ignore[attr-defined]


def test_an_unknown_tensor_or_operation_is_named() -> None:
    x, other = Tensor.empty(3), Tensor.empty(3)
    with pytest.raises(InvalidModel, match="neither an input"):
        read(x + other, x=x)
    with pytest.raises(InvalidModel, match="THREEFRY"):
        read(Tensor.rand(3) + x, x=x)
