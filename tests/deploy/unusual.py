"""Small random checkpoints that say what no published one says, and that the library computes.

Like ``tests/deploy/checkpoints.py``, whose functions write and name them; ``make_golden.py`` saves
what Hugging Face's own models compute on them.
"""

from __future__ import annotations

from tests.deploy import hybrids, moes, variations
from tests.deploy.checkpoints import Case
from tests.deploy.mixtures import Shapes

_OTHER = {"hidden_act": "gelu_pytorch_tanh"}
_LONG = [1.0, 2.0, 5.0, 9.0]  # divisors of LongRoPE


def _vary(case: Case, shapes: Shapes, change: dict[str, object]) -> Case:
    """Return a case with other fields, whose weights have the same names and shapes."""
    table = tuple(shapes)
    change = {**case.change, **change}
    return Case(
        case.architecture,
        case.model_type,
        change,
        shapes=lambda _: iter(table),
        without=case.without,
    )


def _list_cases() -> dict[str, Case]:
    found = {}
    for cases, names in (
        (hybrids, ("qwen3.5", "kimi-linear")),
        (variations, ("qwen3-next", "granite-hybrid")),
    ):
        for name in names:
            case = cases.CASES[name]
            found[name] = _vary(case, cases.iter_shapes(case), _OTHER)
    moe = moes.QWEN3_MOE
    plain = Case("Qwen3MoeForCausalLM", "qwen3_moe", {**moe, "max_position_embeddings": 32})
    shapes = ((name, array.shape) for name, array in moes.make_weights(moe).items())
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    found["qwen3-moe-windows"] = _vary(plain, shapes, windows)
    phi = variations.CASES["phimoe"]
    # Hugging Face's model turns by its short factors whatever the text, so these are the long ones
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "short_factor": _LONG,
        "long_factor": _LONG,
        "short_mscale": 1.3,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 8,
    }
    change = {"rope_parameters": rope, "original_max_position_embeddings": 8}
    found["phimoe-longrope"] = _vary(phi, variations.iter_shapes(phi), change)
    return found


CASES = _list_cases()
