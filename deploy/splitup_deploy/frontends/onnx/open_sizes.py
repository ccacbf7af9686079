"""Sizes that an ONNX file leaves open: those given, a batch of one, or a refusal that names all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.onnx.onnx_graph import OnnxPort

_BATCH: Final = re.compile(r".*batch.*", re.I)
# how exporters call a first axis that is a batch; elsewhere these names say nothing
_FIRST: Final = re.compile(r"n|b|bs|unk__\d+|dynamicdimension\.\d+|dim_?\d*", re.I)


def settle_sizes(
    inputs: Sequence[OnnxPort], given: Mapping[str, int]
) -> tuple[list[OnnxPort], tuple[str, ...]]:
    """Return the inputs with a number for each axis, and notes about sizes that were assumed.

    ``given`` are sizes by the name that the file has for them, or as INPUT.AXIS where it has none.
    A batch that is not given has one row: an axis of that name, and the first axis, unless its name
    is another one. Raises InvalidModel.
    """
    settled: list[OnnxPort] = []
    names: set[str] = set()
    missing: dict[str, str] = {}  # name -> where it is
    assumed: dict[str, None] = {}
    for port in inputs:
        if port.dtype is None or port.shape is None:
            raise InvalidModel(f"input '{port.name:.80}' has no type or shape in the file")
        shape = []
        for axis, size in enumerate(port.shape):
            if isinstance(size, int) and size > 0:
                shape.append(_check_size(port, axis, size))
                continue
            # exporters write an open size as a name, as nothing, as "?" or as -1
            is_named = isinstance(size, str) and size != "?"
            name = str(size) if is_named else f"{port.name}.{axis}"
            names.add(name)
            if name in given:
                shape.append(_check_size(port, axis, given[name]))
            elif _BATCH.fullmatch(name) or (axis == 0 and (not is_named or _FIRST.fullmatch(name))):
                assumed[name] = None
                shape.append(1)
            else:
                missing.setdefault(name, f"axis {axis} of input '{port.name:.80}'")
        settled.append(replace(port, shape=tuple(shape)))
    if missing:
        flags = " ".join(f"--dim {name:.80}=SIZE" for name in missing)
        raise InvalidModel(
            f"the file leaves sizes open ({', '.join(missing.values())}), and tasks have fixed "
            f"ones; give them: {flags}"
        )
    if unknown := sorted(given.keys() - names):
        known = f"it leaves open: {', '.join(sorted(names))}" if names else "all sizes are fixed"
        raise InvalidModel(f"no size of an input is called '{unknown[0]:.80}'; {known}")
    if not assumed:
        return settled, ()
    flags = " ".join(f"--dim {name:.80}=N" for name in assumed)
    return settled, (f"a batch of one is assumed; for another: {flags}",)


def _check_size(port: OnnxPort, axis: int, size: int) -> int:
    if not 1 <= size <= limits.MAX_DIMENSION:
        raise InvalidModel(f"axis {axis} of input '{port.name:.80}' cannot have size {size}")
    return size
