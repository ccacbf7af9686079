"""tinygrad's implementations of ONNX operations, imported without choosing a device.

tinygrad's module makes tensors while it is imported. Each would choose a device, and a machine
without a compiler has none until ``splitup.backend.devices.device_choice`` has set one up.
"""

from __future__ import annotations

from splitup_deploy.frontends.tracing import tracing

with tracing():
    from tinygrad.nn.onnx import (
        Domain,
        OnnxDataType,
        OpSetId,
        onnx_ops,
        required_input_python_consts,
    )

__all__ = ["Domain", "OnnxDataType", "OpSetId", "onnx_ops", "required_input_python_consts"]
