"""ONNX networks that others published: they compile as they are, and a cut changes no byte."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from splitup.core.errors import Unavailable
from tests.deploy.published_onnx import CASES, Published, compute, cut_in_half

# the mean magnitude of each output, as ONNX Runtime 1.32 computes it
MEANS: Final = {
    "model.onnx": (0.0046729,),
    "silero_vad_16k_op15.onnx": (0.054189, 0.315776),
    "silero_vad_16k_sequence.onnx": (0.00549605, 0.294768, 0.615692),
    "silero_vad_half.onnx": (0.0368031, 0.283706),
    "silero_vad_op18_ifless.onnx": (0.054189, 0.315776),
    "silero_vad_openvino_16k.onnx": (0.054189, 0.315776),
    "ch_ppocr_mobile_v2.0_cls_mobile.onnx": (0.5,),
    "PP-OCRv6_det_small.onnx": (5.78508e-05,),
    "PP-OCRv6_rec_small.onnx": (5.34477e-05,),
}


# in small and without files of others: test_onnx.py
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_network_is_cut_and_computes_the_same(case: Published) -> None:
    try:
        whole = case.build()
    except Unavailable as error:
        pytest.skip(f"the file cannot be fetched: {error}")
    half = cut_in_half(case, whole)
    assert len(whole.manifest.tasks) == 1 < len(half.manifest.tasks)
    found, halves = compute(whole), compute(half)
    assert all(np.array_equal(found[name], halves[name]) for name in found)
    means = [np.abs(values.astype(np.float64)).mean() for values in found.values()]
    np.testing.assert_allclose(means, MEANS[case.name], rtol=1e-3)
