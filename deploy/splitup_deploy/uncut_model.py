"""The uncut model: what distributed execution is compared with and measured against."""

from __future__ import annotations

from splitup.backend.runtime import TaskProgram
from splitup.graph.rules import check_graph
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.source_model import Sizes


def load_reference(model: str, sizes: Sizes | None = None, threads: int = 1) -> TaskProgram:
    """Compile a whole model for this process's device, without cutting it.

    Inputs and outputs are the model's own. On one device and code generator its results equal those
    of the cut model byte for byte.
    """
    traced = prepare(model, sizes).traced

    def get_bytes(name: str) -> memoryview:
        return memoryview(b"".join(traced.weights[name].read()))

    return TaskProgram.from_graph(check_graph(traced.graph), get_bytes, threads=threads)
