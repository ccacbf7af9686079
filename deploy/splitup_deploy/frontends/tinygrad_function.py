"""Any tinygrad function, given as ``module:function``.

The function's attribute ``inputs``, ``{name: (dtype, shape)}``, declares its inputs. It is called
once, with one placeholder tensor per name, and returns a tensor or a dict of named tensors:

    def classify(pixels):
        return (pixels.reshape(1, 784) @ WEIGHT).softmax()
    classify.inputs = {"pixels": ("float32", (1, 28, 28))}

Other tensors that the function uses (``WEIGHT``) become the model's weights. They must hold data:
made from numpy arrays, lists or files, or realized. Importing the module runs the developer's own
code on the developer's machine; only the traced arithmetic is published.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.tinygrad_types import get_dtype_name
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup_deploy.cutting.passes import materialise_reductions
from splitup_deploy.frontends.source_model import Sizes, SourceModel
from splitup_deploy.frontends.tracing import TracedModel, Tracer, tracing
from splitup_deploy.frontends.weight_sources import WeightSource


def load_callable(source: str, sizes: Sizes) -> SourceModel:
    """Import and trace ``module:function``; raises InvalidModel when that is not possible."""
    module_name, _, function_name = source.partition(":")
    with tracing():
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m module` would
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise InvalidModel(
                f"cannot import '{module_name}' ({error}); run this where Python finds it"
            ) from None
        function = getattr(module, function_name, None)
        if not callable(function):
            raise InvalidModel(f"module '{module_name}' has no function '{function_name}'")
        return SourceModel("function", trace_function(function, function_name), None)


def trace_function(function: Any, name: str) -> TracedModel:
    """Trace one call of ``function`` on placeholders for its ``inputs``."""
    with tracing():
        tracer = Tracer()
        tensors = {spec.name: tracer.input(spec) for spec in _get_inputs(function, name)}
        result = function(**tensors)
        if isinstance(result, Tensor):
            result = {"output": result}
        if not isinstance(result, Mapping) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in result.items()
        ):
            raise InvalidModel(f"'{name}' must return a tensor or a dict of named tensors")
        _adopt_weights(tracer, [tensor.uop for tensor in result.values()])
        return materialise_reductions(tracer.finish(result, {}))


def _get_inputs(function: Any, name: str) -> list[TensorSpec]:
    declared = getattr(function, "inputs", None)
    if not isinstance(declared, Mapping) or not declared:
        raise InvalidModel(
            f"'{name}' does not say what it takes: set {name}.inputs = "
            "{'x': ('float32', (1, 4))} beside it"
        )
    specs = []
    for key, value in declared.items():
        dtype, shape = value if isinstance(value, tuple) and len(value) == 2 else ("", ())
        if dtype not in ITEM_BYTES or not all(type(n) is int and n >= 1 for n in shape):
            raise InvalidModel(f"'{name}' declares input '{key}' as {value!r:.60}")
        specs.append(TensorSpec(str(key), dtype, tuple(shape)))
    return specs


def _adopt_weights(tracer: Tracer, roots: list[UOp]) -> None:
    """Make a weight of every tensor with data that the traced graph reads."""
    stop = (Ops.COPY, Ops.BUFFER)
    nodes = UOp.sink(*roots).toposort()
    copied = {source.base for uop in nodes if uop.op is Ops.COPY for source in uop.src}
    for uop in nodes:
        if uop.op not in stop or uop in copied or tracer.knows(uop):
            continue
        holder = uop.src[0] if uop.op is Ops.COPY else uop
        if not holder.has_buffer_identity() or holder.base.realized is None:
            continue  # the reader names it
        data = bytes(holder.base.buffer.as_memoryview())
        name = f"weight.{tracer.count_weights()}"
        spec = TensorSpec(name, get_dtype_name(uop.dtype), tuple(int(n) for n in uop.shape))
        tracer.adopt_weight(uop, WeightSource(spec, (data,)))
