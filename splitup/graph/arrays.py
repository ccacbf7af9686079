"""Tensors as numpy arrays: what the reference computes with.

An array has the dtype of its node; bfloat16, which numpy lacks, is held as float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec, get_numpy_dtype
from splitup.graph.dtypes import FLOATS

Array = np.ndarray[Any, Any]


def get_array_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype of the arrays that stand for ``dtype`` here."""
    return np.dtype(np.float32) if dtype == "bfloat16" else get_numpy_dtype(dtype)


def decode_array(spec: TensorSpec, data: bytes | memoryview) -> Array:
    """Return the array of a tensor's bytes; raises InvalidInput when their number is wrong."""
    if len(data) != spec.nbytes:
        raise InvalidInput(f"'{spec.name}' has {len(data)} bytes; {spec} has {spec.nbytes}")
    array = np.frombuffer(data, get_numpy_dtype(spec.dtype)).reshape(spec.shape)
    if spec.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def encode_array(dtype: str, array: Array) -> bytes:
    """Return the tensor's bytes."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype("<u2").tobytes()
    return array.astype(get_numpy_dtype(dtype), copy=False).tobytes(order="C")


def round_array(dtype: str, array: Array) -> Array:
    """Return ``array`` in a node's dtype; every NaN becomes the positive quiet one."""
    if dtype not in FLOATS:
        return np.asarray(array, get_array_dtype(dtype))
    result = np.array(array, get_array_dtype(dtype))
    if dtype == "bfloat16":
        bits = result.view(np.uint32)
        carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits = (bits + carry) & np.uint32(0xFFFF0000)  # to nearest, ties to even
        result = np.where(np.isnan(result), np.float32(math.nan), bits.view(np.float32))
    result[np.isnan(result)] = math.nan
    return result
