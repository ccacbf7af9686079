"""Export a static step with ExecuTorch: a .pte file for XNNPACK, or with portable kernels alone."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.edge.program import INFO, TOKENIZER, EdgeInfo
from splitup_deploy.edge.torch_module import DTYPES, StaticModule
from splitup_deploy.frontends.onnx.onnx_graph import OnnxModel

Backend = Literal["xnnpack", "portable"]
Dtype = Literal["fp32", "fp16", "int8", "int4"]
GROUP: Final = 32  # weights that share a factor in int4


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

    if dtype == "int4":
        widths = {part.in_features for part in module.modules() if isinstance(part, nn.Linear)}
        if bad := sorted(width for width in widths if width % GROUP):
            raise InvalidModel(
                f"int4 has groups of {GROUP} weights, and the model has rows of {bad[0]}, which "
                f"{GROUP} does not divide: export it with --dtype int8"
            )
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8 if dtype == "int8" else torch.int4,
        weight_granularity=PerAxis(0) if dtype == "int8" else PerGroup(GROUP),
    )
    quantize_(module, config)


def export(
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
    _write(program, output)
    return found


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


def _write(program: Any, output: Path) -> None:
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            program.write_to_file(file)
        part.replace(output)
    except OSError as error:
        raise InvalidInput(f"cannot write '{output}': {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


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
