"""The store, the loops and the reduction of a kernel, and kernels of their own for reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tinygrad.uop.ops import KernelInfo, Ops, UOp

from splitup.cpu.loop_indices import NoMatch, is_buffer, refuse_if


def get_parts(sink: UOp) -> tuple[UOp, list[UOp], UOp | None]:
    """Return the store, its loops and the reduction of a kernel: one, or one of what is looked up.

    The reduction is None where there is none. Raises NoMatch for other kernels.
    """
    store, loops = get_store(sink)
    reduces = [uop for uop in sink.toposort() if uop.op is Ops.REDUCE]
    refuse_if(len(reduces) > 2 or (reduces and reduces[0] not in reduces[-1].toposort()))
    return store, loops, reduces[-1] if reduces else None


def get_store(sink: UOp) -> tuple[UOp, list[UOp]]:
    """Return the store of a kernel and its loops; raise NoMatch if it has several."""
    refuse_if(sink.op is not Ops.SINK or len(sink.src) != 1)
    store, *loops = sink.src[0].src if sink.src[0].op is Ops.END else sink.src
    refuse_if(store.op is not Ops.STORE or store.src[0].op is not Ops.INDEX)
    refuse_if(not is_buffer(store.src[0].src[0]))
    return store, list(loops)


def split_reduction(call: UOp, matches: Callable[[UOp], bool]) -> tuple[UOp, ...]:
    """Return a kernel's call, or two of them if a kernel of its own for its reduction ``matches``.

    That one writes its results to where those of the whole go, and the other kernel works there in
    place. So it takes no memory of its own, and the predicted memory holds on every device.
    """
    sink = call.src[0]
    try:
        store, loops, reduce = get_parts(sink)
    except NoMatch:
        return (call,)
    target, value = store.src
    # a target of another type cannot hold the results; one that is also read is still needed
    if reduce is None or value is reduce or target.src[0] in value.toposort():
        return (call,)
    stored = target.store(reduce)
    inner = (stored.end(*loops) if loops else stored).sink(arg=KernelInfo())
    if not matches(inner):
        return (call,)
    return _replace_kernel(call, inner), _replace_kernel(call, sink.substitute({reduce: target}))


def _replace_kernel(call: UOp, sink: UOp) -> UOp:
    """Return a call of another kernel with those of the arguments that it uses."""
    arguments = [item for item in call.src[1:] if not item.is_bound_var]
    bound = [item for item in call.src[1:] if item.is_bound_var]
    # its slots are dense, since tinygrad counts them to number the variables
    kept = sorted(filter(is_buffer, sink.toposort()), key=lambda uop: int(uop.arg.slot))
    new = {
        param: param.replace(arg=replace(param.arg, slot=slot)) for slot, param in enumerate(kept)
    }
    used = (arguments[param.arg.slot] for param in kept)
    # in one walk: a parameter's new form may be the old form of another one of its size
    return call.replace(src=(sink.substitute(new, walk=True), *used, *bound))
