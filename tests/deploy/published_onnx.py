"""ONNX networks that others published, beside ONNX Runtime: the table of ``docs/models.md``.

``pip install onnxruntime``, then ``python -m tests.deploy.published_onnx``; pip fetches the files.
Inputs are random, from one seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends.source_model import Sizes

from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.demo.models import Package, PublishedFile, fetch
from splitup.graph.manifest import Port
from tests.deploy.execution import CutModel

_SILERO: Final = (
    "silero-vad==6.2.3",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)
_RAPID: Final = (
    "rapidocr==3.10.0",
    "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
)
_MAGIKA: Final = (
    "magika==1.0.3",
    "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
)
LARGE: Final = 10**9
_HEAD: Final = "| file | flags | tasks | halves | differs |"


@dataclass(frozen=True, slots=True)
class Published:
    """A published network, and the sizes that its file leaves open."""

    package: tuple[str, str]
    folder: str
    name: str
    dims: Mapping[str, int] = field(default_factory=dict)

    def find(self) -> str:
        """Return the path of the file; raise Unavailable."""
        package = Package(*self.package, f"{self.folder}/{self.name}")
        return str(fetch(PublishedFile(self.name, (package,))))

    def build(self, target_bytes: int = LARGE) -> CompiledModel:
        return build(self.find(), target_bytes, sizes=Sizes(dims=dict(self.dims)))


CASES: Final = (
    Published(_MAGIKA, "magika/models/standard_v3_3", "model.onnx"),
    Published(_SILERO, "silero_vad/data", "silero_vad_16k_op15.onnx", {"sequence": 576}),
    Published(_SILERO, "silero_vad/data", "silero_vad_16k_sequence.onnx", {"sequence_length": 4}),
    Published(_SILERO, "silero_vad/data", "silero_vad_half.onnx", {"sequence": 576}),
    Published(_SILERO, "silero_vad/data", "silero_vad_op18_ifless.onnx", {"sequence": 576}),
    Published(_SILERO, "silero_vad/data", "silero_vad_openvino_16k.onnx"),
    Published(
        _RAPID, "rapidocr/models", "ch_ppocr_mobile_v2.0_cls_mobile.onnx", {"x.2": 48, "x.3": 192}
    ),
    Published(
        _RAPID,
        "rapidocr/models",
        "PP-OCRv6_det_small.onnx",
        {"DynamicDimension.1": 160, "DynamicDimension.2": 160},
    ),
    Published(_RAPID, "rapidocr/models", "PP-OCRv6_rec_small.onnx", {"DynamicDimension.1": 160}),
)


def make_inputs(ports: tuple[Port, ...]) -> dict[str, np.ndarray]:
    """Return random inputs: bytes, numbers around zero, and 16,000 samples a second."""
    draw = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for port in ports:
        if port.dtype == "int64":
            made[port.name] = np.full(port.shape, 16_000)
        elif port.dtype == "int32":
            made[port.name] = draw.integers(0, 256, port.shape).astype(np.int32)
        else:
            made[port.name] = draw.normal(0, 0.3, port.shape).astype(np.float32)
    return made


def compute(compiled: CompiledModel) -> dict[str, np.ndarray]:
    """Return the outputs of one step for ``make_inputs``."""
    inputs, cut = make_inputs(compiled.manifest.inputs), CutModel(compiled)
    data = {p.name: array_to_bytes(p.spec, inputs[p.name]) for p in compiled.manifest.inputs}
    made = cut.step(cut.new_states(), data)
    return {p.name: bytes_to_array(p.spec, made[p.name]) for p in compiled.manifest.outputs}


def cut_in_half(case: Published, whole: CompiledModel) -> CompiledModel:
    """Return a network cut for half of the memory that it takes."""
    (task,) = whole.manifest.tasks
    return case.build(task.vram_bytes // 2)


def describe(case: Published, runtime: Any) -> str:
    """Return a row of the table."""
    whole = case.build()
    found, half = compute(whole), cut_in_half(case, whole)
    halves = compute(half)
    are_equal = all(np.array_equal(found[name], halves[name]) for name in found)
    session = runtime.InferenceSession(case.find(), providers=["CPUExecutionProvider"])
    inputs = make_inputs(whole.manifest.inputs)
    given = dict(zip((port.name for port in session.get_inputs()), inputs.values(), strict=True))
    differs = 0.0
    for ours, theirs in zip(found.values(), session.run(None, given), strict=True):
        largest = np.abs(theirs).max()
        differs = max(differs, float(np.abs(ours.astype(np.float64) - theirs).max() / largest))
    flags = " ".join(f"`--dim {name}={size}`" for name, size in case.dims.items())
    equal = "equal" if are_equal else "DIFFERENT"
    return f"| {case.name} | {flags} | {len(half.manifest.tasks)} | {equal} | {differs:.1g} |"


if __name__ == "__main__":
    runtime = importlib.import_module("onnxruntime")
    print(f"{_HEAD}\n|{' --- |' * (_HEAD.count('|') - 1)}")
    for case in CASES:
        print(describe(case, runtime), flush=True)
