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
from pathlib import Path
from typing import Final

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
        graph: Span | None = None
        opsets: dict[str, int] = {}
        for field in self.fields((0, len(self.data))):
            if field[0] == 7:
                self.expect(graph is None, "has two graphs")
                graph = self.span(field)
            elif field[0] == 8:
                domain, version = self.read_opset(self.span(field))
                self.expect(domain not in opsets, f"imports the domain '{domain:.40}' twice")
                opsets[domain] = version
        if graph is None:
            raise self.fail("has no graph")
        return OnnxModel(self.read_graph(graph, 1), opsets)

    def read_opset(self, span: Span) -> tuple[str, int]:
        domain, version = "", 0
        for field in self.fields(span):
            if field[0] == 1:
                domain = self.text(field)
            elif field[0] == 2:
                version = self.integer(field)
        return "" if domain == "ai.onnx" else domain, version

    def read_graph(self, span: Span, depth: int) -> OnnxGraph:
        self.expect(depth <= MAX_DEPTH, f"nests graphs more than {MAX_DEPTH} deep")
        nodes: list[OnnxNode] = []
        tensors: dict[str, OnnxTensor] = {}
        ports: dict[int, list[OnnxPort]] = {11: [], 12: []}
        for field in self.fields(span):
            if field[0] == 1:
                nodes.append(self.read_node(self.span(field), depth))
                self.expect(len(nodes) <= limits.MAX_GRAPH_NODES, "has too many nodes")
            elif field[0] == 5:
                tensor = self.read_tensor(self.span(field))
                self.expect(tensor.name not in tensors, f"has two tensors '{tensor.name:.80}'")
                tensors[tensor.name] = tensor
                self.expect(len(tensors) <= limits.MAX_WEIGHTS, "has too many tensors")
            elif field[0] in ports:
                ports[field[0]].append(self.read_port(self.span(field)))
                # before opset 4 of the format every tensor is listed among the inputs, too
                self.expect(len(ports[field[0]]) <= limits.MAX_WEIGHTS, "has too many ports")
            elif field[0] == 15:
                raise self.fail("has a sparse tensor, which is not supported")
        return OnnxGraph(tuple(nodes), tensors, tuple(ports[11]), tuple(ports[12]))

    def read_node(self, span: Span, depth: int) -> OnnxNode:
        names: dict[int, list[str]] = {1: [], 2: []}
        texts = {3: "", 4: "", 7: ""}
        attributes: dict[str, object] = {}
        for field in self.fields(span):
            if field[0] in names:
                names[field[0]].append(self.text(field))
            elif field[0] in texts:
                texts[field[0]] = self.text(field)
            elif field[0] == 5:
                name, value = self.read_attribute(self.span(field), depth)
                self.expect(name not in attributes, f"gives the attribute '{name:.40}' twice")
                attributes[name] = value
        domain = "" if texts[7] == "ai.onnx" else texts[7]
        return OnnxNode(texts[4], domain, texts[3], tuple(names[1]), tuple(names[2]), attributes)

    def read_attribute(self, span: Span, depth: int) -> tuple[str, object]:
        name, kind = "", 0
        single: dict[int, object] = {2: 0.0, 3: 0, 4: ""}
        floats: list[float] = []
        ints: list[int] = []
        strings: list[str] = []
        for field in self.fields(span):
            number = field[0]
            if number == 1:
                name = self.text(field)
            elif number == 2:
                values = self.floats(field, FIXED32, "f")
                self.expect(len(values) == 1, f"has no float in attribute '{name:.40}'")
                single[2] = values[0]
            elif number == 3:
                single[3] = self.integer(field)
            elif number == 4:
                single[4] = self.text(field)
            elif number == 5:
                single[5] = self.read_tensor(self.span(field))
            elif number == 6:
                single[6] = self.read_graph(self.span(field), depth + 1)
            elif number == 7:
                floats += self.floats(field, FIXED32, "f")
            elif number == 8:
                ints += self.integers(field)
            elif number == 9:
                strings.append(self.text(field))
            elif number == 20:
                kind = self.integer(field)
            elif number == 21:
                raise self.fail(f"refers to a function's attribute in '{name:.40}'")
        lists: dict[int, object] = {6: tuple(floats), 7: tuple(ints), 8: tuple(strings)}
        if kind in lists:
            return name, lists[kind]
        field_of_kind = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6}.get(kind)
        self.expect(field_of_kind in single, f"has an attribute '{name:.40}' of kind {kind}")
        assert field_of_kind is not None  # it is a key of single
        return name, single[field_of_kind]

    def read_port(self, span: Span) -> OnnxPort:
        name = ""
        dtype: str | None = None
        shape: tuple[int | str | None, ...] | None = None
        for field in self.fields(span):
            if field[0] == 1:
                name = self.text(field)
            elif field[0] == 2:
                for kind in self.fields(self.span(field)):
                    if kind[0] == 1:
                        dtype, shape = self.read_tensor_type(self.span(kind), name)
                    elif kind[0] in (4, 5, 8, 9):
                        what = {4: "sequence", 5: "map", 8: "sparse tensor", 9: "optional"}
                        raise self.fail(f"has a port '{name:.80}' that is a {what[kind[0]]}")
        return OnnxPort(name, dtype, shape)

    def read_tensor_type(
        self, span: Span, name: str
    ) -> tuple[str | None, tuple[int | str | None, ...] | None]:
        dtype: str | None = None
        shape: tuple[int | str | None, ...] | None = None
        for field in self.fields(span):
            if field[0] == 1:
                code = self.integer(field)
                dtype = self.get_dtype(code, name) if code else None
            elif field[0] == 2:
                dimensions: list[int | str | None] = []
                for entry in self.fields(self.span(field)):
                    if entry[0] == 1:
                        dimensions.append(self.read_dimension(self.span(entry)))
                self.expect(len(dimensions) <= limits.MAX_RANK, f"gives '{name:.80}' too many axes")
                shape = tuple(dimensions)
        return dtype, shape

    def read_dimension(self, span: Span) -> int | str | None:
        value: int | str | None = None
        for field in self.fields(span):
            if field[0] == 1:
                value = self.integer(field)
            elif field[0] == 2:
                value = self.text(field) or None
        return value

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
        texts = {1: "", 2: ""}
        for field in self.fields(span):
            if field[0] in texts:
                texts[field[0]] = self.text(field)
        return texts[1], texts[2]

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
