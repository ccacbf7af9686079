from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.tinygrad_function import trace_function
from splitup_deploy.uncut_model import load_reference
from tinygrad import Tensor

from splitup.core.errors import InvalidModel
from tests.deploy.execution import CutModel

MODULE = """
import numpy as np
from tinygrad import Tensor

random = np.random.default_rng(3)
FIRST = random.normal(0, 0.2, (24, 48)).astype(np.float32)
SECOND = random.normal(0, 0.2, (48, 10)).astype(np.float32)
W1, W2, BIAS = Tensor(FIRST), Tensor(SECOND).realize(), Tensor([0.5] * 10)


def classify(pixels, shift):
    hidden = (pixels.flatten(1) @ W1).relu()
    scores = hidden @ W2 + BIAS + shift.float()
    return {"scores": scores, "classes": scores.softmax(), "best": scores.argmax(1)}


classify.inputs = {"pixels": ("float32", (2, 4, 6)), "shift": ("int32", (1,))}


TWINS = Tensor(FIRST), Tensor(FIRST.copy())


def answer_twice(x):
    left, right = (x @ twin for twin in TWINS)
    return {"left": left, "right": right}


answer_twice.inputs = {"x": ("float32", (1, 24))}


def nameless(x):
    return x


def numbers(x):
    return 3


numbers.inputs = {"x": ("float32", (2,))}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("callable")
    (path / "pictures.py").write_text(MODULE)
    return path


def test_a_function_is_cut_and_gives_what_numpy_gives(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    compiled = build("pictures:classify", 6 * 1024)
    cut, whole = CutModel(compiled), load_reference("pictures:classify")
    assert compiled.manifest.kind == "function" and compiled.manifest.text is None
    assert len(cut.programs) > 1
    pixels = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    inputs = {"pixels": pixels.tobytes(), "shift": np.array([2], np.int32).tobytes()}
    given = cut.step(cut.new_states(), inputs)
    results = whole.run(whole.new_state(), [inputs[spec.name] for spec in whole.inputs])
    assert dict(zip([spec.name for spec in whole.outputs], results, strict=True)) == given

    random = np.random.default_rng(3)
    first = random.normal(0, 0.2, (24, 48)).astype(np.float32)
    second = random.normal(0, 0.2, (48, 10)).astype(np.float32)
    scores = np.maximum(pixels.reshape(2, 24) @ first, 0) @ second + 0.5 + 2
    powers = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(
        np.frombuffer(given["scores"], np.float32).reshape(2, 10), scores, rtol=1e-5
    )
    np.testing.assert_allclose(
        np.frombuffer(given["classes"], np.float32).reshape(2, 10),
        powers / powers.sum(1, keepdims=True),
        rtol=1e-5,
    )
    np.testing.assert_array_equal(np.frombuffer(given["best"], np.int32), scores.argmax(1))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent_module:f", "cannot import 'absent_module'"),
        ("pictures:absent", "no function 'absent'"),
        ("pictures:FIRST", "no function"),
        ("pictures:nameless", "does not say what it takes"),
        ("pictures:numbers", "must return a tensor"),
        ("pictures", "does not exist"),
    ],
)
def test_what_cannot_be_traced_is_named(
    reference: str, message: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    with pytest.raises(InvalidModel, match=message):
        build(reference, 10**6)


def test_random_numbers_have_no_place_in_a_task() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + Tensor.rand(2)

    noisy.inputs = {"x": ("float32", (2,))}  # type: ignore[attr-defined]
    with pytest.raises(InvalidModel):
        trace_function(noisy, "noisy")


def test_two_outputs_may_have_equal_weights(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task holds equal weights once, but gives no value twice."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    cut = CutModel(build("pictures:answer_twice", 10**6))
    assert len(cut.manifest.tasks) == 1
    x = np.arange(24, dtype=np.float32)
    given = cut.step(cut.new_states(), {"x": x.tobytes()})
    assert given["left"] == given["right"] != bytes(len(given["left"]))
