"""A compiled task: which kernels run in which order on which memory, as plain data.

``compile_graph`` makes a ``Schedule`` with tinygrad, in seconds; ``splitup.backend.runtime`` loads
one in milliseconds. A schedule holds machine code, so a node never sends or receives one: it stays
on the node's disk (``splitup.backend.compiler.kernel_cache``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tinygrad.device import Device
from tinygrad.engine.realize import get_call_arg_uops, lower_and_compile
from tinygrad.helpers import Context
from tinygrad.schedule import create_linear_with_vars
from tinygrad.tensor import transform_to_call
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.batching import (
    BufferKind,
    KernelSpan,
    Rows,
    classify_kernel,
    find_kinds,
    find_spans,
)
from splitup.backend.compiler import row_sums
from splitup.backend.compiler.arena_layout import MemoryPlan, plan_memory
from splitup.backend.compiler.launch_sizes import read_size
from splitup.backend.compiler.lowering import Lowered, lower_graph
from splitup.backend.compiler.simplified_sizes import keep_simplified
from splitup.backend.compiler.tinygrad_fixes import install_fixes, keep_order
from splitup.backend.compiler.unrolling import NotTiled, install_bound
from splitup.core.errors import InvalidModel, SplitUpError
from splitup.core.garbage_collection import pause_garbage_collection
from splitup.cpu import native_kernels
from splitup.cpu.native_kernels import NativeKernel
from splitup.graph.ir import Graph, remove_names
from splitup.graph.rules import CheckedGraph

Role = Literal["input", "weight", "old", "new", "value"]

# Kernels, and so the bytes of results, depend on these settings of tinygrad, which it reads from
# the environment. They are the same for all nodes of a class; changing one makes another class.
# A sum that is divided takes memory that its graph does not show, and is no load from a table.
_SETTINGS: Final[Mapping[str, Any]] = {
    **{"BEAM": 0, "NOOPT": 0, "NOLOCALS": 0, "TC": 1, "TC_SELECT": -1, "TC_OPT": 0},
    **{"ALLOW_TF32": 0, "IMAGE": 0, "EMULATED_DTYPES": "", "TRANSCENDENTAL": 1, "PCONTIG": 0},
    **{"DISABLE_FAST_IDIV": 1, "SPLIT_REDUCEOP": 0, "TUPLE_ORDER": 1, "MAX_KERNEL_BUFFERS": 0},
    **{"DEFAULT_FLOAT": "float32", "DEFAULT_INT": "int32", "NO_MEMORY_PLANNER": 1},
    **{"TRACK_MATCH_STATS": 0, "CACHELEVEL": 0},
}


_MAX_SCHEDULES: Final = 16  # of tasks that this process compiled itself
_schedules: Final[dict[tuple[Graph, str, bool], Schedule]] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of one buffer: input, weight, a state's old or new tensor, or another value.

    In a batch of several executions each has some of its rows, which the symbol ``rows`` counts and
    which are ``row_bytes`` apart; or, when it ``is_own``, a buffer of its own in place of this one.
    """

    role: Role
    index: int
    offset: int
    nbytes: int
    rows: str = ""
    row_bytes: int = 0
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Executable:
    """A kernel's machine code, and what tinygrad's runtime for the device needs to load it."""

    code: bytes
    name: str
    target: str
    signature: tuple[tuple[str | None, int, str, tuple[int, ...]], ...]  # name, slot, dtype, shape
    variables: tuple[str, ...]
    global_size: tuple[Any, ...]  # of the variables: ``splitup.backend.compiler.launch_sizes``
    local_size: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel run: an executable or a native kernel, by its position, on these places.

    A launch that ``is_shared`` computes the rows of several executions at once. ``tiled`` is the
    position of an executable that does the same, faster where there are many rows.
    """

    kind: Literal["executable", "native", "state update"]  # the last one is native, too
    index: int
    places: tuple[Place, ...]
    is_shared: bool = False
    tiled: int | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Launches ``first`` … ``end - 1``, as consecutive steps of one execution run them together.

    Shared ones run once for all steps. The others run step after step, each on the rows that it
    would have alone; ``read`` and ``kept`` are the values that cross the borders of the block.
    """

    first: int
    end: int
    is_shared: bool
    read: tuple[Place, ...] = ()
    kept: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that a task needs on its device. Sizes are in bytes."""

    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    states: tuple[int, ...]
    values: tuple[int, ...]
    outputs: tuple[Place, ...]
    executables: tuple[Executable, ...]
    natives: tuple[NativeKernel, ...]
    launches: tuple[Launch, ...]
    blocks: tuple[Block, ...]  # () where consecutive steps run one by one


@pause_garbage_collection()
def compile_graph(graph: CheckedGraph, device: str, *, uses_native_code: bool = True) -> Schedule:
    """Schedule and compile a graph; raises InvalidModel for what tinygrad cannot."""
    try:
        return _compile(graph, device, uses_native_code)
    except SplitUpError:
        raise
    except Exception as error:  # tinygrad raises anything, and the graph is a stranger's
        reason = f"{type(error).__name__}: {error!s:.200}"
        raise InvalidModel(f"tinygrad cannot compile the graph ({reason})") from error


def compile_once(graph: CheckedGraph, device: str, *, uses_native_code: bool = True) -> Schedule:
    """Do the same; graphs that differ in names alone, as a model's blocks do, are compiled once."""
    key = remove_names(graph), device, uses_native_code
    if key not in _schedules:
        if len(_schedules) == _MAX_SCHEDULES:
            _schedules.pop(next(iter(_schedules)))
        _schedules[key] = compile_graph(graph, device, uses_native_code=uses_native_code)
    return _schedules[key]


def _compile(graph: CheckedGraph, device: str, uses_native_code: bool) -> Schedule:
    install_fixes()
    keep_simplified()
    install_bound()
    lowered = lower_graph(graph, device)
    is_native = uses_native_code and native_kernels.computes_for(device)
    with Context(**_SETTINGS):
        linear = _schedule_parts(lowered)
        plan = plan_memory(linear, lowered)
        updates = _find_updates(graph, lowered) if is_native else {}
        kinds = find_kinds(graph, lowered)
        kernels = list(_iter_kernels(plan, kinds, lowered, is_native, updates))
        rest = tuple(kernel.call for kernel in kernels if kernel.native is None)
        tiled = _compile_tiled(rest, device)
        compiled = iter(lower_and_compile(linear.replace(src=rest)).src)
    writer = _Writer(lowered, plan.views)
    for kernel in kernels:
        call = next(compiled) if kernel.native is None else kernel.call
        writer.add(kernel, call, tiled.get(kernel.call.src[0]))
    mentioned = [kernel.buffers for kernel in kernels]
    spans = find_spans(mentioned, [kernel.is_shared for kernel in kernels], kinds, lowered)
    return writer.finish(plan.outputs, spans)


def _schedule_parts(lowered: Lowered) -> UOp:
    """Return the calls of all parts in order; of equal parts one is scheduled."""
    scheduled: list[tuple[UOp, ...]] = []
    linear = UOp(Ops.LINEAR)
    for part in lowered.parts:
        if part.roots:
            call, _ = transform_to_call(UOp.sink(*part.roots))
            linear, variables = create_linear_with_vars(call)
            if variables:
                raise InvalidModel("the graph bound variables while it was scheduled")
            scheduled.append(linear.src)
            continue
        # temporaries are not among a part's buffers: every part has its own
        buffers = dict(zip(lowered.parts[part.pattern].buffers, part.buffers, strict=True))
        for call in scheduled[part.pattern]:
            for operand in call.src[1:]:
                if operand.op is Ops.BUFFER and operand not in buffers:
                    buffers[operand] = _copy_buffer(operand)
        scheduled.append(
            tuple(
                call.replace(src=(call.src[0], *(buffers.get(src, src) for src in call.src[1:])))
                for call in scheduled[part.pattern]
            )
        )
    return linear.replace(src=tuple(call for calls in scheduled for call in calls))


def _compile_tiled(calls: Sequence[UOp], device: str) -> dict[UOp, UOp]:
    """Return programs of many rows at once, by the kernel that does the same for any number."""
    renderer = Device[device].renderer
    if not row_sums.applies_to(renderer):
        return {}
    keep_order(renderer)
    programs = {}
    for call in {call.src[0]: call for call in calls}.values():
        kernel, *operands = call.src
        if kernel.variables() and kernel.op_in_backward_slice_with_self(Ops.REDUCE):
            named = call.replace(src=(row_sums.name_tiled(kernel), *operands))
            with suppress(NotTiled):
                (done,) = lower_and_compile(UOp(Ops.LINEAR, src=(named,))).src
                programs[kernel] = done.src[0]
    return programs


def _copy_buffer(buffer: UOp) -> UOp:
    count = int(buffer.nbytes()) // buffer.dtype.itemsize
    return UOp.new_buffer(buffer.device, count, buffer.dtype)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One call of the schedule, the native kernel that computes it, and its arguments' kinds."""

    call: UOp
    native: NativeKernel | None
    operands: tuple[UOp, ...]
    buffers: tuple[UOp, ...]  # that the operands are, before they got their places in the arena
    kinds: dict[UOp, BufferKind]
    is_shared: bool
    is_update: bool = False


@dataclass(frozen=True, slots=True)
class _Update:
    """The native kernel of a state's update, and the buffers it takes, in order."""

    kernel: NativeKernel
    buffers: tuple[UOp, ...]


_Updates = dict[UOp, _Update]  # by the buffer of the state's new value


def _find_updates(graph: CheckedGraph, lowered: Lowered) -> _Updates:
    in_memory = [index for index, node in enumerate(graph.nodes) if node.op == "CONTIGUOUS"]
    stored = dict(zip(in_memory, lowered.values, strict=True))
    stored |= {
        index: lowered.inputs[node.arg]
        for index, node in enumerate(graph.nodes)
        if node.op == "INPUT" and isinstance(node.arg, int)
    }
    updates: _Updates = {}
    for state, found in native_kernels.match_updates(graph).items():
        new, old = lowered.updates[state], lowered.states[state]
        buffers = new, old, stored[found.fresh], lowered.inputs[found.layout]
        updates[new] = _Update(found.kernel, buffers)
    return updates


def _iter_kernels(
    plan: MemoryPlan,
    kinds: dict[UOp, BufferKind],
    lowered: Lowered,
    is_native: bool,
    updates: _Updates,
) -> Iterator[_Kernel]:
    for position, update in _find_needed(plan, lowered, updates).items():
        whole, buffers = plan.calls[position], plan.buffers[position]
        is_split = is_native and update is None
        for call in native_kernels.split_call(whole) if is_split else (whole,):
            operands = tuple(get_call_arg_uops(call))
            is_shared = classify_kernel(call.src[0], [buffers[item] for item in operands], kinds)
            given = {item: kinds[buffers[item]] for item in operands}
            if update is not None:
                places = {buffers[item]: item for item in operands}
                taken = tuple(places[buffer] for buffer in update.buffers)
                yield _Kernel(
                    call, update.kernel, taken, update.buffers, given, is_shared, is_update=True
                )
                continue
            found = native_kernels.match_kernel(call.src[0]) if is_native else None
            kernel, taken = None, operands
            if found is not None:
                kernel, taken = found[0], tuple(operands[slot] for slot in found[1])
            originals = tuple(buffers[item] for item in taken)
            yield _Kernel(call, kernel, taken, originals, given, is_shared)


def _find_needed(
    plan: MemoryPlan, lowered: Lowered, updates: _Updates
) -> dict[int, _Update | None]:
    """Return the calls that are needed, by position, with the native update that replaces one.

    A temporary that only a replaced call would have read is not computed.
    """
    # the first call that mentions a value is the one that writes it
    writers = dict.fromkeys((*lowered.inputs, *lowered.weights, *lowered.states), -1)
    for position, buffers in enumerate(plan.buffers):
        for buffer in buffers.values():
            writers.setdefault(buffer, position)
    found = {
        writers[new]: update
        for new, update in updates.items()
        if new in writers and set(update.buffers) <= set(plan.buffers[writers[new]].values())
    }
    read = {*lowered.values, *lowered.outputs}
    needed = []
    for position in range(len(plan.calls) - 1, -1, -1):
        operands = list(plan.buffers[position].values())
        if any(writers[buffer] == position and buffer in read for buffer in operands):
            needed.append(position)
            read.update(found[position].buffers if position in found else operands)
    return {position: found.get(position) for position in reversed(needed)}


class _Writer:
    """Collects a schedule; of equal kernels one is kept."""

    def __init__(self, lowered: Lowered, views: Mapping[UOp, tuple[UOp, int]]) -> None:
        self._lowered = lowered
        self._views = views
        self._places: dict[UOp, tuple[Role, int]] = {}
        roles: tuple[tuple[Role, tuple[UOp, ...]], ...] = (
            ("input", lowered.inputs),
            ("weight", lowered.weights),
            ("old", lowered.states),
            ("new", lowered.updates),
        )
        for role, uops in roles:
            self._places |= {uop: (role, index) for index, uop in enumerate(uops)}
        self._values: list[int] = []
        self._executables: dict[Executable, int] = {}
        self._programs: dict[UOp, int] = {}
        self._natives: dict[NativeKernel, int] = {}
        self._launches: list[Launch] = []
        self._placed: dict[UOp, Place] = {}  # by buffer, where the operands are

    def add(self, kernel: _Kernel, call: UOp, tiled: UOp | None) -> None:
        """Add one kernel; ``call`` is its call, compiled unless the kernel is native.

        ``tiled`` is the program that computes many rows at once, if there is one.
        """
        for buffer, operand in zip(kernel.buffers, kernel.operands, strict=True):
            self._placed[buffer] = self._place(operand, kernel)
        if kernel.native is not None:
            places = tuple(self._place(operand, kernel) for operand in kernel.operands)
            index = self._natives.setdefault(kernel.native, len(self._natives))
            kind: Literal["native", "state update"] = "native"
            if kernel.is_update:
                kind = "state update"
            self._launches.append(Launch(kind, index, places, kernel.is_shared))
            return
        operands = get_call_arg_uops(call)
        program = call.src[0]
        if program.op is not Ops.PROGRAM:
            raise InvalidModel(f"tinygrad scheduled {program.op.name} where a kernel belongs")
        places = tuple(self._place(operands[slot], kernel) for slot in program.arg.globals)
        index, many = self._keep(program), None
        if tiled is not None and tiled.arg.globals == program.arg.globals:
            many = self._keep(tiled)
        self._launches.append(Launch("executable", index, places, kernel.is_shared, many))

    def _keep(self, program: UOp) -> int:
        if program not in self._programs:
            executable = _read_executable(program)
            index = self._executables.setdefault(executable, len(self._executables))
            self._programs[program] = index
        return self._programs[program]

    def finish(self, outputs: Sequence[UOp], spans: Sequence[KernelSpan]) -> Schedule:
        """Return all that was added; ``spans`` cover the kernels."""
        lowered = self._lowered
        places = tuple(self._place(uop) for uop in outputs)
        return Schedule(
            inputs=tuple(map(_count_bytes, lowered.inputs)),
            weights=tuple(map(_count_bytes, lowered.weights)),
            states=tuple(map(_count_bytes, lowered.states)),
            values=tuple(self._values),
            outputs=places,
            executables=tuple(self._executables),
            natives=tuple(self._natives),
            launches=tuple(self._launches),
            blocks=tuple(
                Block(
                    span.first,
                    span.end,
                    span.is_shared,
                    tuple(self._placed[buffer] for buffer in span.read),
                    tuple(self._placed[buffer] for buffer in span.kept),
                )
                for span in spans
            ),
        )

    def _place(self, uop: UOp, kernel: _Kernel | None = None) -> Place:
        """Return the place of an operand: a buffer, or a view of the arena."""
        base, offset = self._views.get(uop, (uop, 0))
        if base not in self._places:
            self._places[base] = ("value", len(self._values))
            self._values.append(_count_bytes(base))
        place = Place(*self._places[base], offset, _count_bytes(uop))
        kind = None if kernel is None else kernel.kinds[uop]
        if isinstance(kind, Rows):
            return replace(place, rows=kind.symbol, row_bytes=kind.stride * uop.dtype.itemsize)
        return replace(place, is_own=kind == "own")


def _count_bytes(uop: UOp) -> int:
    return int(uop.max_numel()) * int(uop.dtype.itemsize)


def _read_executable(program: UOp) -> Executable:
    elf, info = program.to_elf(), program.arg
    # the places of arguments: tinygrad's numbers have gaps
    # (``splitup.backend.compiler.tinygrad_fixes``)
    numbers = (*info.globals, *(variable.arg.slot for variable in info.vars))
    places = {number: place for place, number in enumerate(numbers)}
    return Executable(
        code=elf.lib,
        name=elf.name,
        target=str(elf.target),
        signature=tuple(
            (name, places[slot], str(dtype).removeprefix("dtypes."), _get_sizes(shape))
            for name, slot, dtype, shape in elf.signature
        ),
        variables=tuple(str(variable.expr) for variable in info.vars),
        global_size=tuple(map(read_size, info.global_size)),
        local_size=None if info.local_size is None else tuple(map(read_size, info.local_size)),
    )


def _get_sizes(shape: tuple[Any, ...] | None) -> tuple[int, ...]:
    """Return a parameter's shape; runtimes use only whether there is one, not its sizes."""
    return tuple(size if isinstance(size, int) else 0 for size in shape or ())
