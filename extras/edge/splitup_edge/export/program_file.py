"""Export a static step with ExecuTorch: a .pte file for XNNPACK, or with portable kernels alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from splitup_deploy.frontends.onnx.onnx_graph import OnnxModel
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.showing.progress import write_whole
from splitup_deploy.uncut_model import load_reference
from torch import Tensor, nn

from splitup.core.errors import InvalidModel
from splitup_edge.export.measure import EagerProgram, measure
from splitup_edge.export.plan import GROUP, Backend, Dtype, ExportPlan
from splitup_edge.export.torch_module import DTYPES, StaticModule
from splitup_edge.program import INFO, TOKENIZER, EdgeInfo, EdgeProgram


def make_modules(models: Mapping[str, OnnxModel], dtype: Dtype) -> dict[str, nn.Module]:
    """Return the torch module of every method; raises InvalidModel for weights that do not fit."""
    held: dict[str, Tensor] = {}
    plain = "float16" if dtype == "fp16" else "float32"
    is_narrow = dtype in ("int8", "int4")
    modules: dict[str, nn.Module] = {}
    for name, model in models.items():
        modules[name] = StaticModule(model, plain, held, has_narrow_table=is_narrow).eval()
        if is_narrow:
            _quantise(modules[name], dtype)
    return modules


def _quantise(module: nn.Module, dtype: Dtype) -> None:
    """Store the weights of products as integers; rows are quantised when they are multiplied."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    def is_narrowed(part: nn.Module, _: str = "") -> bool:
        return isinstance(part, nn.Linear) and not part.is_exact

    if dtype == "int4":
        widths = {part.in_features for part in module.modules() if is_narrowed(part)}
        if bad := sorted(width for width in widths if width % GROUP):
            raise InvalidModel(
                f"int4 has groups of {GROUP} weights, and the model has rows of {bad[0]}, which "
                f"{GROUP} does not divide: export it with --dtype int8"
            )
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8 if dtype == "int8" else torch.int4,
        weight_granularity=PerAxis(0) if dtype == "int8" else PerGroup(GROUP),
    )
    quantize_(module, config, is_narrowed)


def export_program(
    modules: Mapping[str, nn.Module],
    info: EdgeInfo,
    tokenizer: bytes,
    backend: Backend,
    output: Path,
) -> dict[str, dict[str, Any]]:
    """Write a .pte file, whole or not at all; return what was delegated, by method.

    Raises InvalidModel for what ExecuTorch cannot export, InvalidInput for a file that cannot be
    written.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    with _quiet():
        try:
            programs = {
                name: torch.export.export(module, _make_example(info, name))
                for name, module in modules.items()
            }
            lowered = to_edge_transform_and_lower(
                programs,
                partitioner={
                    name: [XnnpackPartitioner()] if backend == "xnnpack" else []
                    for name in programs
                },
                constant_methods={
                    INFO: info.model_dump_json(),
                    TOKENIZER: torch.frombuffer(bytearray(tokenizer), dtype=torch.uint8),
                },
            )
            found = {name: _count_delegated(lowered.exported_program(name)) for name in programs}
            program = lowered.to_executorch(ExecutorchBackendConfig())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            problem = str(error).partition("\n")[0] or type(error).__name__
            raise InvalidModel(f"ExecuTorch cannot export the model: {problem:.300}") from None
    with write_whole(output) as file:
        program.write_to_file(file)
    return found


def check_program(
    file: Path, model: str, plan: ExportPlan, modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Compare a file with the model that is cut for the market; see ``measure``."""
    program = EdgeProgram(file, threads=1)
    info = program.info
    exact = modules if plan.dtype == "fp32" else make_modules(plan.models, "fp32")
    eager = EagerProgram(info.model_copy(update={"dtype": "float32"}), exact)
    reference = load_reference(model, Sizes(info.max_len, info.chunk))
    return measure(program, eager, reference)


def _make_example(info: EdgeInfo, method: str) -> tuple[Tensor, ...]:
    shapes = info.make_shape(method).inputs
    return tuple(
        torch.zeros(shape, dtype=torch.int64 if len(shape) == 2 else DTYPES[info.dtype])
        for shape in shapes.values()
    )


def _count_delegated(program: Any) -> dict[str, Any]:
    """Return how many operations a back end computes, and which others the portable kernels."""
    from executorch.devtools.backend_debug import get_delegation_info

    report = get_delegation_info(program.graph_module)
    rows = report.delegation_by_operator
    others = {name: found.non_delegated for name, found in rows.items() if found.non_delegated}
    total = report.num_delegated_nodes + report.num_non_delegated_nodes
    return {
        "delegated": report.num_delegated_nodes,
        "operations": total,
        "subgraphs": report.num_delegated_subgraphs,
        "others": others,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what torch logs and warns of while it exports."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
