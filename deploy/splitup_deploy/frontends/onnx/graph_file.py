"""Read an ONNX file: its graph as plain data, its tensors as places in files.

The file may come from anybody, so this reader is stricter than protobuf libraries: every length is
checked against the message around it, messages nest to a fixed depth, fields have the wire type
of their declaration, sizes are bounded, tensors have exactly the bytes of their shape, and external
data stay inside the model's directory. Tensor data in raw form are not read here at all.
Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, fields by their numbers.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES
from splitup_deploy.frontends.onnx.onnx_graph import (
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    OnnxPort,
    OnnxTensor,
)
from splitup_deploy.frontends.onnx.protobuf_reader import (
    BYTES,
    FIXED32,
    FIXED64,
    MAX_LISTED,
    Field,
    ProtobufReader,
    Span,
    take_last,
)
from splitup_deploy.frontends.own_files import check_own
from splitup_deploy.frontends.weight_sources import FileSlice

DTYPES: Final[dict[int, str]] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
UNSUPPORTED_DTYPES: Final[dict[int, str]] = {
    0: "undefined",
    8: "string",
    14: "complex64",
    15: "complex128",
    17: "float8e4m3fn",
    18: "float8e4m3fnuz",
    19: "float8e5m2",
    20: "float8e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4e2m1",
    24: "float8e8m0",
    25: "uint2",
    26: "int2",
}

MAX_DEPTH: Final = 8  # subgraphs within subgraphs; real models have 2
# Of a graph's fields; before opset 4 of the format every tensor is listed among the inputs, too.
_MOST: Final = {
    1: (limits.MAX_GRAPH_NODES, "nodes"),
    **{number: (limits.MAX_WEIGHTS, "tensors or ports") for number in (5, 11, 12)},
}
_OTHER_PORTS: Final = {4: "sequence", 5: "map", 8: "sparse tensor", 9: "optional"}


def read_onnx(path: Path) -> OnnxModel:
    """Read a file; raises InvalidModel naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if not size:
                raise InvalidModel(f"ONNX file '{path}' is empty; export the model again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read_model()
    except OSError as error:
        raise InvalidModel(f"cannot read ONNX file '{path}': {error.strerror}") from None


class _Reader(ProtobufReader):
    def read_model(self) -> OnnxModel:
        found = self.gather((0, len(self.data)), {7: self.span, 8: self.read_opset})
        self.expect(len(found[7]) == 1, "has two graphs" if found[7] else "has no graph")
        opsets = self.by_name(found[8], "imports the domain")
        return OnnxModel(self.read_graph(found[7][0], 1), opsets)

    def by_name(self, pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
        """Return values by their names, which are unique."""
        values: dict[str, Any] = {}
        for name, value in pairs:
            self.expect(name not in values, f"{what} '{name:.80}' twice")
            values[name] = value
        return values

    def read_opset(self, field: Field) -> tuple[str, int]:
        found = self.gather(self.span(field), {1: self.text, 2: self.integer})
        domain = take_last(found[1], "")
        return "" if domain == "ai.onnx" else domain, take_last(found[2], 0)

    def read_graph(self, span: Span, depth: int) -> OnnxGraph:
        self.expect(depth <= MAX_DEPTH, f"nests graphs more than {MAX_DEPTH} deep")
        readers: dict[int, Callable[[Field], Any]] = {
            1: lambda field: self.read_node(self.span(field), depth),
            5: lambda field: self.read_tensor(self.span(field)),
            **dict.fromkeys((11, 12), self.read_port),
            15: self.refuse_sparse,
        }
        found = self.gather(span, readers, _MOST)
        tensors = self.by_name([(one.name, one) for one in found[5]], "has the tensor")
        return OnnxGraph(tuple(found[1]), tensors, tuple(found[11]), tuple(found[12]))

    def refuse_sparse(self, field: Field) -> None:
        raise self.fail("has a sparse tensor, which is not supported")

    def read_node(self, span: Span, depth: int) -> OnnxNode:
        readers: dict[int, Callable[[Field], Any]] = {
            **dict.fromkeys((1, 2, 3, 4, 7), self.text),
            5: lambda field: self.read_attribute(self.span(field), depth),
        }
        found = self.gather(span, readers)
        name, op, domain = (take_last(found[number], "") for number in (3, 4, 7))
        domain = "" if domain == "ai.onnx" else domain
        attributes = self.by_name(found[5], "gives the attribute")
        return OnnxNode(op, domain, name, tuple(found[1]), tuple(found[2]), attributes)

    def read_attribute(self, span: Span, depth: int) -> tuple[str, object]:
        readers: dict[int, Callable[[Field], Any]] = {
            **dict.fromkeys((1, 4, 9, 21), self.text),
            **dict.fromkeys((2, 7), lambda field: self.floats(field, FIXED32, "f")),
            **dict.fromkeys((3, 20), self.integer),
            5: lambda field: self.read_tensor(self.span(field)),
            6: lambda field: self.read_graph(self.span(field), depth + 1),
            8: self.integers,
        }
        found = self.gather(span, readers)
        name, kind = take_last(found[1], ""), take_last(found[20], 0)
        self.expect(not found[21], f"refers to a function's attribute in '{name:.40}'")
        self.expect(all(len(one) == 1 for one in found[2]), f"has no float in '{name:.40}'")
        lists = {6: chain(*found[7]), 7: chain(*found[8]), 8: found[9]}
        if kind in lists:
            return name, tuple(lists[kind])
        single = {
            **{1: [0.0, *chain(*found[2])], 2: [0, *found[3]], 3: ["", *found[4]]},
            **{4: found[5], 5: found[6]},
        }
        self.expect(bool(single.get(kind)), f"has an attribute '{name:.40}' of kind {kind}")
        return name, single[kind][-1]

    def read_port(self, field: Field) -> OnnxPort:
        kinds = dict.fromkeys((1, *_OTHER_PORTS), self.span)
        readers = {1: self.text, 2: lambda field: self.gather(self.span(field), kinds)}
        found = self.gather(self.span(field), readers)
        name = take_last(found[1], "")
        dtype, shape = None, None
        for of_kind in found[2]:
            for number, what in _OTHER_PORTS.items():
                self.expect(not of_kind[number], f"has a port '{name:.80}' that is a {what}")
            for span in of_kind[1]:
                dtype, shape = self.read_tensor_type(span, name)
        return OnnxPort(name, dtype, shape)

    def read_tensor_type(
        self, span: Span, name: str
    ) -> tuple[str | None, tuple[int | str | None, ...] | None]:
        axes = {1: self.read_dimension}
        readers: dict[int, Callable[[Field], Any]] = {
            1: self.integer,
            2: lambda field: self.gather(self.span(field), axes)[1],
        }
        found = self.gather(span, readers)
        fits = all(len(shape) <= limits.MAX_RANK for shape in found[2])
        self.expect(fits, f"gives '{name:.80}' too many axes")
        code, shape = take_last(found[1], 0), take_last(found[2], None)
        return self.get_dtype(code, name) if code else None, None if shape is None else tuple(shape)

    def read_dimension(self, field: Field) -> int | str | None:
        values = [
            self.integer(one) if one[0] == 1 else self.text(one) or None
            for one in self.fields(self.span(field))
            if one[0] in (1, 2)
        ]
        return values[-1] if values else None

    def get_dtype(self, code: int, name: str) -> str:
        if code not in DTYPES:
            what = UNSUPPORTED_DTYPES.get(code, f"number {code}")
            raise InvalidModel(
                f"ONNX file '{self.path}' gives '{name:.80}' the type {what}, which is not "
                f"supported; these are: {', '.join(DTYPES.values())}"
            )
        return DTYPES[code]

    def read_tensor(self, span: Span) -> OnnxTensor:
        name, code, location = "", 0, 0
        dimensions: list[int] = []
        external: dict[str, str] = {}
        numbers: dict[int, list[float] | list[int]] = {}
        slices: dict[int, list[Span]] = {}
        for field in self.fields(span):
            number = field[0]
            if number == 1:
                dimensions += self.integers(field)
                self.expect(len(dimensions) <= limits.MAX_RANK, "has a tensor of too many axes")
            elif number == 2:
                code = self.integer(field)
            elif number in (5, 7, 11):
                listed: list[int] = numbers.setdefault(number, [])  # type: ignore[assignment]
                listed += self.integers(field)
                self.expect(len(listed) <= MAX_LISTED, f"lists more than {MAX_LISTED} numbers")
            elif number in (4, 9, 10):
                slices.setdefault(number, []).append(self.fixed(field))
            elif number == 8:
                name = self.text(field)
            elif number in (3, 6):
                raise self.fail(f"has a tensor '{name:.80}' in segments or of strings")
            elif number == 13:
                key, value = self.read_pair(self.span(field))
                external[key] = value
            elif number == 14:
                location = self.integer(field)
        dtype = self.get_dtype(code, name)
        self.expect(
            all(0 <= size <= limits.MAX_DIMENSION for size in dimensions)
            and math.prod(dimensions) * ITEM_BYTES[dtype] <= limits.MAX_VALUE_BYTES,
            f"has a tensor '{name:.80}' of impossible shape",
        )
        nbytes = math.prod(dimensions) * ITEM_BYTES[dtype]
        self.expect(
            len(slices) + len(numbers) + (location == 1) <= 1 and location in (0, 1),
            f"gives the data of tensor '{name:.80}' more than once",
        )
        data: FileSlice | bytes = b""
        if location == 1:
            data = self.find_external(external, name, nbytes)
        elif slices:
            data = self.join_slices(slices, dtype, name)
        elif numbers:
            data = self.encode_numbers(*numbers.popitem(), dtype, name)
        length = len(data) if isinstance(data, bytes) else data.end - data.start
        self.expect(
            length == nbytes,
            f"has a tensor '{name:.80}' of {nbytes} bytes with {length} bytes of data",
        )
        return OnnxTensor(name, dtype, tuple(dimensions), data)

    def fixed(self, field: Field) -> Span:
        """Return the place of raw data, or of one or many packed floats or doubles."""
        number, wire, value = field
        allowed = {4: (BYTES, FIXED32), 9: (BYTES,), 10: (BYTES, FIXED64)}[number]
        self.expect(wire in allowed, f"has no data in field {number}")
        assert isinstance(value, tuple)  # as the wire type says
        return value

    def join_slices(
        self, slices: dict[int, list[Span]], dtype: str, name: str
    ) -> FileSlice | bytes:
        ((number, spans),) = slices.items()
        wanted = {4: "float32", 10: "float64"}.get(number, dtype)
        self.expect(wanted == dtype, f"has a tensor '{name:.80}' whose data are no {dtype}")
        if len(spans) == 1:
            return FileSlice(self.path, *spans[0])
        self.expect(number != 9, f"gives the data of tensor '{name:.80}' more than once")
        self.expect(len(spans) <= MAX_LISTED, f"lists more than {MAX_LISTED} numbers")
        return b"".join(self.data[start:end] for start, end in spans)

    def encode_numbers(
        self, number: int, values: list[float] | list[int], dtype: str, name: str
    ) -> bytes:
        """Return the bytes of integers; 16-bit floats are listed by their bits."""
        homes = {
            5: ("int32", "int16", "int8", "uint16", "uint8", "bool", "float16", "bfloat16"),
            7: ("int64",),
            11: ("uint32", "uint64"),
        }
        self.expect(dtype in homes[number], f"has a tensor '{name:.80}' whose data are no {dtype}")
        size = ITEM_BYTES[dtype]
        mask = 2 ** (8 * size) - 1
        return b"".join((int(value) & mask).to_bytes(size, "little") for value in values)

    def read_pair(self, span: Span) -> tuple[str, str]:
        found = self.gather(span, {1: self.text, 2: self.text})
        return take_last(found[1], ""), take_last(found[2], "")

    def find_external(self, external: dict[str, str], name: str, nbytes: int) -> FileSlice:
        """Return the place of a tensor's data in another file of the model's directory."""
        location = external.get("location", "")
        bad = not location or "\0" in location or "\\" in location or Path(location).is_absolute()
        self.expect(not bad, f"keeps tensor '{name:.80}' in {location!r:.80}")
        path = check_own(self.path.parent / location, self.path.parent)
        self.expect(
            path.is_file(),
            f"keeps tensor '{name:.80}' in {location!r:.80}, which is no file beside it",
        )
        texts = external.get("offset", "0"), external.get("length", str(nbytes))
        self.expect(
            all(text.isascii() and text.isdigit() and len(text) <= 19 for text in texts),
            f"gives tensor '{name:.80}' an impossible place",
        )
        start, length = int(texts[0]), int(texts[1])
        self.expect(
            start + length <= path.stat().st_size,
            f"places tensor '{name:.80}' behind the file's end",
        )
        return FileSlice(path, start, start + length)
