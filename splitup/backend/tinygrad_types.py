"""The dtypes and symbols of graphs as tinygrad knows them, and tinygrad's version."""

from __future__ import annotations

from typing import Final

from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import UOp

from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES
from splitup.graph.ir import Symbol

TINYGRAD_VERSION: Final = "0.14.0"

# "weak" dtypes are those of Python numbers, which take the dtype that they are used with
WEAK_DTYPES: Final[dict[DType, str]] = {dtypes.weakint: "int32", dtypes.weakfloat: "float32"}
_DTYPES: Final[dict[str, DType]] = {name: getattr(dtypes, name) for name in ITEM_BYTES}
_NAMES: Final[dict[DType, str]] = {dtype: name for name, dtype in _DTYPES.items()} | WEAK_DTYPES


def get_tinygrad_dtype(name: str) -> DType:
    """Return tinygrad's dtype of this name."""
    return _DTYPES[name]


def get_dtype_name(dtype: DType) -> str:
    """Return the name of a tinygrad dtype; raises InvalidModel when tasks do not support it."""
    if dtype not in _NAMES:
        raise InvalidModel(f"the traced graph uses dtype {dtype}, which tasks do not support")
    return _NAMES[dtype]


def make_variable(symbol: Symbol) -> UOp:
    """Return the tinygrad variable that stands for a symbol."""
    return UOp.variable(symbol.name, 1, symbol.maximum)
