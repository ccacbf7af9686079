"""ONNX files: any graph of fixed shapes becomes a function model.

The file is read by ``graph_file``; each node is then traced with tinygrad's implementation of its
operation (``tinygrad.nn.onnx``), or with our own where tinygrad's differs from the specification
(``basic_ops``). Inputs and outputs become ports, initialisers become weights. A value that a node
needs while it is traced, such as the shape of a Reshape, is computed here from constants. If it
depends on an input, the model is refused, because a task's memory must be known before it runs.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.tinygrad_types import get_dtype_name, get_tinygrad_dtype
from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec, get_numpy_dtype
from splitup_deploy.cutting.passes import materialise_reductions
from splitup_deploy.frontends.onnx.basic_ops import CONSTANT_INPUTS, OPERATIONS, REFUSED
from splitup_deploy.frontends.onnx.graph_file import read_onnx
from splitup_deploy.frontends.onnx.onnx_graph import OnnxGraph, OnnxNode, OnnxPort, OnnxTensor
from splitup_deploy.frontends.onnx.open_sizes import settle_sizes
from splitup_deploy.frontends.onnx.tinygrad_ops import (
    Domain,
    OpSetId,
    onnx_ops,
    required_input_python_consts,
)
from splitup_deploy.frontends.source_model import Sizes, SourceModel
from splitup_deploy.frontends.tracing import TRACE_DEVICE, TracedModel, Tracer, tracing
from splitup_deploy.frontends.weight_sources import WeightSource

MIN_OPSET, MAX_OPSET = 7, 28  # 6 broadcast in another way; 28 is what the tests cover
MICROSOFT: Final = frozenset(  # operations of com.microsoft that tinygrad implements
    "Attention BiasGelu DequantizeLinear EmbedLayerNormalization FastGelu Gelu QLinearAdd "
    "QLinearGlobalAveragePool QLinearMul QuantizeLinear SkipLayerNormalization".split()
)
MAX_FOLDED_BYTES: Final = 64 * 1024  # a constant that a shape depends on; 16 numbers are usual
MAX_FOLDED_ELEMENTS: Final = 2**20  # of everything on the way to it: a second in pure Python
MAX_ALL_FOLDED: Final = 16 * MAX_FOLDED_ELEMENTS  # of all such constants of a model
MAX_TRACED: Final = 8 * limits.MAX_GRAPH_NODES  # tinygrad's operations; shapes are some of them
# operations that read each element of an operand many times, so operands are written to memory
_REREAD: Final = frozenset(
    "Attention AveragePool Conv ConvInteger ConvTranspose Einsum Gemm LRN LayerNormalization "
    "LogSoftmax MatMul MatMulInteger MaxPool QLinearConv QLinearMatMul Resize Softmax TopK".split()
)
# Operations that choose elements of their first operand. tinygrad adds up what it chooses from, so
# booleans and narrow integers become wider.
_CHOOSING: Final = frozenset(
    "Compress Gather GatherElements GatherND ReverseSequence ScatterElements ScatterND".split()
)
_AXES: Final = ("Squeeze", "Unsqueeze")
_NAME: Final = re.compile(r"[^\x21-\x7e]")


def load_onnx(source: str, sizes: Sizes) -> SourceModel:
    """Trace an ONNX file; ``sizes.dims`` gives its symbolic dimensions by name.

    Raises InvalidModel naming the node, or the input, and the problem.
    """
    model = read_onnx(Path(source))
    for domain, version in model.opsets.items():
        if domain == "" and not MIN_OPSET <= version <= MAX_OPSET:
            raise InvalidModel(
                f"'{source}' uses version {version} of the ONNX operations; supported: "
                f"{MIN_OPSET} to {MAX_OPSET}: convert it with onnx.version_converter"
            )
    with tracing():
        importer = _Importer(model.opsets)
        traced = importer.trace(model.graph, dict(sizes.dims))
        return SourceModel("function", materialise_reductions(traced), None)


def get_constant_inputs(op: str) -> tuple[int, ...]:
    """Return the places of the inputs that an operation needs before the model runs."""
    places = CONSTANT_INPUTS.get(op, required_input_python_consts.get(op, ()))
    return tuple(places)


class _Importer:
    def __init__(self, opsets: Mapping[str, int]) -> None:
        self.opsets = opsets
        self.tracer = Tracer()
        self.inputs: dict[UOp, str] = {}  # placeholder -> the input's name
        self.weights: dict[UOp, OnnxTensor] = {}
        self.names: dict[str, int] = {}  # and the last number behind each
        self.dynamic: dict[UOp, bool] = {}  # does a traced operation depend on an input?
        self.folded: dict[UOp, Any] = {}
        self.elements_left = MAX_ALL_FOLDED

    # ---- the whole graph -----------------------------------------------------------------------

    def trace(self, graph: OnnxGraph, dims: dict[str, int]) -> TracedModel:
        values: dict[str, Tensor | None] = {"": None}
        inputs = [port for port in graph.inputs if port.name not in graph.tensors]
        if not inputs:
            raise InvalidModel("the model has no inputs: there is nothing to compute")
        settled, notes = settle_sizes(inputs, dims)
        for port in settled:
            values[port.name] = self.add_input(port)
        self.run(graph, values)
        outputs: dict[str, Tensor] = {}
        for port in graph.outputs:
            tensor = values.get(port.name)
            if tensor is None:
                raise InvalidModel(f"output '{port.name:.80}' is not computed by any node")
            outputs[self.rename(port.name)] = self.check_output(port, tensor)
        self.check_inputs_used([tensor.uop for tensor in outputs.values()])
        self.adopt([tensor.uop for tensor in outputs.values()])
        traced = self.tracer.finish(self.separate(outputs), {})
        return replace(traced, notes=(*notes, *traced.notes))

    def add_input(self, port: OnnxPort) -> Tensor:
        assert port.dtype is not None and port.shape is not None
        shape = tuple(size for size in port.shape if isinstance(size, int))
        spec = TensorSpec(self.rename(port.name), port.dtype, shape)
        if spec.nbytes > limits.MAX_TENSOR_BYTES:
            raise InvalidModel(
                f"input '{port.name:.80}' has {spec.nbytes} bytes; "
                f"at most {limits.MAX_TENSOR_BYTES} are possible"
            )
        tensor = self.tracer.input(spec)
        self.inputs[tensor.uop.base] = port.name
        return tensor

    def check_output(self, port: OnnxPort, tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        if 0 in shape:
            raise InvalidModel(f"output '{port.name:.80}' is empty: its shape is {list(shape)}")
        declared = port.shape or tuple(None for _ in shape)
        if port.shape is not None and (
            len(declared) != len(shape)
            or any(type(a) is int and 0 < a != b for a, b in zip(declared, shape, strict=True))
        ):
            raise InvalidModel(
                f"output '{port.name:.80}' has shape {list(shape)}; the file says {list(declared)}"
            )
        if port.dtype not in (None, (dtype := get_dtype_name(tensor.dtype))):
            raise InvalidModel(f"output '{port.name:.80}' is {dtype}; the file says {port.dtype}")
        return tensor

    def check_inputs_used(self, roots: Sequence[UOp]) -> None:
        unused = self.inputs.keys() - UOp.sink(*roots).toposort().keys()
        if unused:
            name = min(self.inputs[uop] for uop in unused)
            raise InvalidModel(
                f"no output depends on the input '{name:.80}': remove it from the model's inputs"
            )

    def separate(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give every output a place in memory of its own, even two that are one value."""
        result: dict[str, Tensor] = {}
        taken: set[UOp] = set()
        for name, tensor in outputs.items():
            uop = tensor.contiguous().uop
            while uop.op is not Ops.CONTIGUOUS or uop in taken:
                uop = UOp(Ops.CONTIGUOUS, src=(uop,))
            taken.add(uop)
            self.tracer.label(uop, f"{name.replace(':', '.')}: output")
            result[name] = Tensor(uop)
        return result

    def rename(self, name: str) -> str:
        """Return a legal name for a port or weight that no other one has."""
        base = _NAME.sub("_", name)[: limits.MAX_NAME_CHARS - 8] or "value"
        result = base
        while result in self.names:
            self.names[base] += 1
            result = f"{base}.{self.names[base]}"
        self.names[result] = 1
        return result

    def adopt(self, roots: Sequence[UOp]) -> None:
        """Turn constant tables of operations into weights, and tinygrad's ranges into IOTA."""
        ranges: dict[int, UOp] = {}
        for uop in UOp.sink(*roots).toposort():
            if uop.op is Ops.BUFFER and not self.tracer.knows(uop):
                if (memory := uop.realized) is None:
                    continue  # the reader of the graph names it
                name = self.rename("constant")
                spec = TensorSpec(name, get_dtype_name(uop.dtype), tuple(map(int, uop.shape)))
                source = WeightSource(spec, (bytes(memory.as_memoryview()),))
                self.tracer.adopt_weight(uop, source)
            elif uop.op is Ops.ADD and get_dtype_name(uop.dtype) == "int32" and len(uop.shape) == 1:
                length = int(uop.shape[0])
                if length not in ranges:
                    ranges[length] = Tensor.arange(length).uop
                if uop is ranges[length]:
                    self.tracer.adopt_iota(uop, length)

    # ---- nodes ---------------------------------------------------------------------------------

    def run(self, graph: OnnxGraph, values: dict[str, Tensor | None]) -> None:
        """Trace the nodes of a graph; ``values`` has the names it may read, and gets its own."""
        for name, tensor in graph.tensors.items():
            values[name] = self.add_tensor(tensor)
        readers = Counter(name for node in graph.nodes for name in set(node.inputs))
        for node in graph.nodes:
            for name in node.inputs:
                if name not in values:
                    raise InvalidModel(f"{node} reads '{name:.80}', which no earlier node gives")
            for name in node.outputs:
                if name and name in values:
                    raise InvalidModel(f"{node} gives '{name:.80}', which exists already")
            if node.op in _REREAD:
                for name in node.inputs:
                    values[name] = self.write(values[name], node)
            results = self.run_node(node, values)
            for name, result in zip(node.outputs, results, strict=False):
                if result is not None:
                    self.depends_on_input(result, node)
                values[name] = self.write(result, node) if readers[name] > 1 else result
            values[""] = None

    def run_node(self, node: OnnxNode, values: dict[str, Tensor | None]) -> list[Tensor | None]:
        if node.op == "If" and not node.domain:
            return self.run_if(node, values)
        try:
            function = self.find(node)
            _check_operands(node, function)
            operands = [values[name] for name in node.inputs]
            results = function(*self.prepare(node, operands), **self.get_options(node))
            results = list(results) if isinstance(results, tuple | list) else [results]
            tensors = [self.as_tensor(node, result) for result in results]
            if node.op in _CHOOSING and tensors[0] is not None and operands[0] is not None:
                tensors[0] = tensors[0].cast(operands[0].dtype)
            for tensor in tensors:
                shape = () if tensor is None else tensor.shape  # tinygrad checks it only now
                if len(shape) > limits.MAX_RANK or math.prod(shape) > limits.MAX_ELEMENTS:
                    raise ValueError(f"a result of shape {list(shape)} is too large")
        except (InvalidModel, MemoryError):
            raise
        except Exception as error:  # tinygrad's implementations raise errors of many types
            problem = str(error).partition("\n")[0] or type(error).__name__
            raise InvalidModel(f"{node}, opset {self.get_opset(node)}: {problem:.300}") from None
        if len(node.outputs) > len(tensors):
            raise InvalidModel(f"{node} has {len(node.outputs)} outputs; {len(tensors)} are known")
        return tensors

    def as_tensor(self, node: OnnxNode, result: Any) -> Tensor | None:
        if result is None or isinstance(result, Tensor):
            return result
        if isinstance(result, int):  # Size
            return Tensor(UOp.const(result, get_tinygrad_dtype("int64")))
        raise InvalidModel(f"{node} gives a {type(result).__name__}, which is no tensor")

    def find(self, node: OnnxNode) -> Any:
        """Return the function that implements a node's operation at the model's version."""
        if node.domain and (node.domain != "com.microsoft" or node.op not in MICROSOFT):
            raise InvalidModel(f"{node} is of the domain '{node.domain:.80}', which is unknown")
        if node.op in REFUSED:
            raise InvalidModel(f"{node} is not supported: {REFUSED[node.op]}")
        opset = self.get_opset(node)
        if not node.domain and node.op in OPERATIONS:
            versions = OPERATIONS[node.op]
            if (since := max((v for v in versions if v <= opset), default=0)) != 0:
                return versions[since]
        found = onnx_ops.get(node.op)
        if isinstance(found, dict):
            domain = Domain.from_onnx(node.domain)
            since = max((i.version for i in found if i[0] is domain and i[1] <= opset), default=0)
            found = found.get(OpSetId(domain, since))
        if found is None:
            raise InvalidModel(f"{node} at opset {opset}: the operation is not supported")
        return found

    def get_opset(self, node: OnnxNode) -> int:
        return self.opsets.get(node.domain, 1)

    def get_options(self, node: OnnxNode) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for name, value in node.attributes.items():
            if isinstance(value, OnnxTensor):
                value = self.add_tensor(value)
            elif isinstance(value, OnnxGraph):
                raise InvalidModel(f"{node} is not supported: it contains a graph '{name:.40}'")
            options[name] = list(value) if isinstance(value, tuple) else value
        if node.op == "Split":
            if options.get("num_outputs", len(node.outputs)) != len(node.outputs):
                raise InvalidModel(f"{node} does not have as many outputs as num_outputs says")
            options["num_outputs"] = len(node.outputs)
        return options

    def prepare(self, node: OnnxNode, operands: Sequence[Tensor | None]) -> list[Any]:
        """Return the operands; those that the operation needs while tracing as numbers."""
        wanted = get_constant_inputs(node.op)
        result: list[Any] = []
        for place, tensor in enumerate(operands):
            if tensor is not None and place in wanted:
                value = self.fold(node, node.inputs[place], tensor)
                if isinstance(value, int) and (node.op in _AXES or node.op.startswith("Reduce")):
                    value = [value]  # exporters write one axis as a scalar, too
                result.append(value)
            else:
                result.append(tensor)
        return result

    def run_if(self, node: OnnxNode, values: dict[str, Tensor | None]) -> list[Tensor | None]:
        """Trace one branch when the condition is constant, else both and choose by value."""
        branches = [node.attributes.get(name) for name in ("then_branch", "else_branch")]
        condition = values[node.inputs[0]] if len(node.inputs) == 1 else None
        if condition is None or math.prod(condition.shape) != 1:
            raise InvalidModel(f"{node} wants one condition")
        condition = condition.reshape(())
        constant = not self.depends_on_input(condition, node)
        if constant:
            chosen = self.fold(node, node.inputs[0], condition)
            branches = [branches[0 if chosen else 1]]
        results = []
        for branch in branches:
            if not isinstance(branch, OnnxGraph):
                raise InvalidModel(f"{node} lacks a branch")
            scope = dict(values)
            self.run(branch, scope)
            results.append([scope.get(port.name) for port in branch.outputs])
        if len({len(row) for row in results} | {len(node.outputs)}) != 1:
            raise InvalidModel(f"{node} has branches with different numbers of outputs")
        if constant:
            return results[0]
        merged: list[Tensor | None] = []
        for name, yes, no in zip(node.outputs, *results, strict=True):
            if yes is None or no is None or (yes.shape, yes.dtype) != (no.shape, no.dtype):
                raise InvalidModel(
                    f"{node} gives '{name:.80}' a shape that depends on an input; "
                    "every shape must be known before the model runs"
                )
            merged.append(condition.where(yes, no))
        return merged

    # ---- constants -----------------------------------------------------------------------------

    def add_tensor(self, tensor: OnnxTensor) -> Tensor:
        """Return a single number as a constant, everything else as a weight's placeholder."""
        dtype = get_tinygrad_dtype(tensor.dtype)
        if math.prod(tensor.shape) == 0:
            return Tensor([], dtype=dtype).reshape(tensor.shape)
        if math.prod(tensor.shape) == 1:
            bits = np.frombuffer(tensor.read(), get_numpy_dtype(tensor.dtype))
            if tensor.dtype == "bfloat16":
                bits = (bits.astype(np.uint32) << 16).view(np.float32)
            return Tensor(UOp.const(bits[0].item(), dtype)).reshape(tensor.shape)
        spec = TensorSpec(self.rename(tensor.name or "constant"), tensor.dtype, tensor.shape)
        result = self.tracer.weight(WeightSource(spec, (tensor.data,)))
        self.weights[result.uop.base] = tensor
        return result

    def depends_on_input(self, tensor: Tensor, node: OnnxNode) -> bool:
        """Say whether a value depends on an input; label reductions, which a pass stores."""
        pending = [tensor.uop]
        while pending:
            uop = pending[-1]
            if uop in self.dynamic:
                pending.pop()
                continue
            if missing := [source for source in uop.src if source not in self.dynamic]:
                pending.extend(missing)
                continue
            if len(self.dynamic) >= MAX_TRACED:
                raise InvalidModel(f"{node} and those before it take more than {MAX_TRACED} steps")
            self.dynamic[uop] = uop in self.inputs or any(self.dynamic[src] for src in uop.src)
            if uop.op in (Ops.REDUCE, Ops.CONTIGUOUS):
                self.tracer.label(uop, _make_label(node))
            pending.pop()
        return self.dynamic[tensor.uop]

    def fold(self, node: OnnxNode, name: str, tensor: Tensor) -> Any:
        """Return the value of a constant: a number, a list, or bytes for uint8."""
        if tensor.uop not in self.folded:
            self.folded[tensor.uop] = self.compute(node, name, tensor)
        return self.folded[tensor.uop]

    def compute(self, node: OnnxNode, name: str, tensor: Tensor) -> Any:
        known: dict[UOp, UOp] = {}
        elements = 0
        for uop in tensor.uop.toposort():
            if uop in self.inputs:
                raise InvalidModel(
                    f"{node} needs '{name:.80}' before it runs, but that depends on the input "
                    f"'{self.inputs[uop]:.80}'; every shape must be known before the model runs"
                )
            if (held := self.weights.get(uop)) is not None:
                if held.nbytes > MAX_FOLDED_BYTES:
                    raise InvalidModel(f"{node} needs a constant '{name:.80}' of {held.nbytes} B")
                dtype = get_tinygrad_dtype(held.dtype)
                data = Tensor(held.read(), dtype=get_tinygrad_dtype("uint8")).bitcast(dtype)
                known[uop] = data.uop
            if uop.op not in (Ops.SINK, Ops.STACK):
                elements += math.prod(int(size) for size in uop.shape)
        self.elements_left -= elements
        if elements > MAX_FOLDED_ELEMENTS or self.elements_left < 0:
            raise InvalidModel(f"{node} needs a constant '{name:.80}' that takes long to compute")
        value = Tensor(tensor.uop.substitute(known))
        if value.device is None:  # tinygrad would take the CPU, whose last bits differ
            value = value.clone(TRACE_DEVICE)
        if 0 in value.shape:
            return []
        return value.data().tobytes() if get_dtype_name(value.dtype) == "uint8" else value.tolist()

    # ---- values in memory ----------------------------------------------------------------------

    def write(self, tensor: Tensor | None, node: OnnxNode) -> Tensor | None:
        """Write a computed value to memory, unless it is there or does not depend on an input."""
        there = (Ops.BUFFER, Ops.CONST, Ops.CONTIGUOUS)
        if tensor is None or 0 in tensor.shape or tensor.uop.base.op in there:
            return tensor
        if not self.depends_on_input(tensor, node):
            return tensor
        return self.tracer.mark(tensor, _make_label(node))


def _check_operands(node: OnnxNode, function: Any) -> None:
    """Raise unless the function takes every input as a tensor or number.

    Attributes are parameters of the function as well, and an input must not set one.
    """
    wanted = get_constant_inputs(node.op)
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    variadic = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    for place in range(len(node.inputs)):
        if place >= len(named):
            takes = variadic
        else:
            kind = str(named[place].annotation)
            unknown = named[place].annotation is inspect.Parameter.empty
            takes = place in wanted or unknown or "Tensor" in kind or "Self" in kind
        if not takes:
            raise ValueError(f"input {place} is one too many")


def _make_label(node: OnnxNode) -> str:
    title = node.title.strip("/").removesuffix(f"/{node.op}") or node.op
    return f"{_NAME.sub('_', title)[:60].replace(':', '.')}: {node.op}"
