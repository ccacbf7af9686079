"""Write an ONNX model, field by field, without the ``onnx`` package.

Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, fields by their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from splitup_deploy.frontends.onnx.graph_file import DTYPES
from splitup_deploy.frontends.onnx.onnx_graph import OnnxModel, OnnxNode, OnnxPort, OnnxTensor

from splitup.core.errors import InvalidModel

IR_VERSION: Final = 11  # the format of the file that goes with opset 23
MAX_FILE_BYTES: Final = 2**31 - 1  # of a protobuf message
_CODES: Final = {name: code for code, name in DTYPES.items()}


def encode_varint(value: int) -> bytes:
    """Return an integer as protobuf writes it; negative ones have ten bytes."""
    value %= 2**64
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])


def encode_number(tag: int, value: int) -> bytes:
    """Return a field with an integer."""
    return encode_varint(tag << 3) + encode_varint(value)


def encode_piece(tag: int, data: bytes | str) -> bytes:
    """Return a field with a text, bytes or a message."""
    data = data.encode() if isinstance(data, str) else data
    return encode_varint(tag << 3 | 2) + encode_varint(len(data)) + data


def encode_attribute(name: str, value: Any) -> bytes:
    """Return an attribute: a number, or a tuple of integers."""
    head = encode_piece(1, name)
    if isinstance(value, float):
        return head + encode_varint(2 << 3 | 5) + struct.pack("<f", value) + encode_number(20, 1)
    if isinstance(value, int):
        return head + encode_number(3, value) + encode_number(20, 2)
    return head + b"".join(encode_number(8, item) for item in value) + encode_number(20, 7)


def encode_node(node: OnnxNode) -> bytes:
    """Return a node of ONNX's own operations."""
    data = b"".join(encode_piece(1, name) for name in node.inputs)
    data += b"".join(encode_piece(2, name) for name in node.outputs)
    data += encode_piece(3, node.name) + encode_piece(4, node.op)
    pairs = node.attributes.items()
    return data + b"".join(encode_piece(5, encode_attribute(*pair)) for pair in pairs)


def encode_port(port: OnnxPort) -> bytes:
    """Return an input or output of fixed sizes."""
    sizes = (encode_piece(1, encode_number(1, int(size))) for size in port.shape or () if size)
    kind = encode_number(1, _CODES[port.dtype or "float32"]) + encode_piece(2, b"".join(sizes))
    return encode_piece(1, port.name) + encode_piece(2, encode_piece(1, kind))


def write_onnx(model: OnnxModel) -> Iterator[bytes]:
    """Yield the file in pieces, so that memory does not grow with the model.

    Raises InvalidModel for a model that one file cannot hold.
    """
    graph, small = model.graph, b""
    small += b"".join(encode_piece(1, encode_node(node)) for node in graph.nodes)
    small += encode_piece(2, "static step")
    small += b"".join(encode_piece(11, encode_port(port)) for port in graph.inputs)
    small += b"".join(encode_piece(12, encode_port(port)) for port in graph.outputs)
    heads = {name: _start_tensor(tensor) for name, tensor in graph.tensors.items()}
    size = len(small) + sum(
        len(head) + tensor.nbytes
        for head, tensor in zip(heads.values(), graph.tensors.values(), strict=True)
    )
    if size > MAX_FILE_BYTES:
        raise InvalidModel(
            f"the model takes {size / 1e9:.1f} GB as ONNX, and one file holds "
            f"{MAX_FILE_BYTES / 1e9:.1f} GB: export it with --backend xnnpack"
        )
    opsets = b"".join(
        encode_piece(8, encode_piece(1, domain) + encode_number(2, version))
        for domain, version in model.opsets.items()
    )
    yield encode_number(1, IR_VERSION) + opsets
    yield encode_varint(7 << 3 | 2) + encode_varint(size) + small
    yield from _write_tensors(graph.tensors, heads)


def _start_tensor(tensor: OnnxTensor) -> bytes:
    """Return what stands before a tensor's bytes, which end it."""
    head = b"".join(encode_number(1, size) for size in tensor.shape)
    head += encode_number(2, _CODES[tensor.dtype]) + encode_piece(8, tensor.name)
    head += encode_varint(9 << 3 | 2) + encode_varint(tensor.nbytes)
    return encode_varint(5 << 3 | 2) + encode_varint(len(head) + tensor.nbytes) + head


def _write_tensors(
    tensors: Mapping[str, OnnxTensor], heads: Mapping[str, bytes]
) -> Iterator[bytes]:
    for name, tensor in tensors.items():
        yield heads[name]
        yield tensor.read()
