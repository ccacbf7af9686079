"""What an adapter gains on a text, in nats per token, with and without encryption.

    python -m bench.measure.adapter_gain [TEXT…]    by default the sample beside the example adapter

The hidden states are those of the example model, computed by its compiled tasks. Prints one JSON
object per text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends.source_model import Sizes
from splitup_private.adapters.ckks import ClientKeys, Evaluation
from splitup_private.adapters.layout import get_layout
from splitup_private.adapters.weights import Adapter, get_total_bits, load_adapter
from tokenizers import Tokenizer

from splitup.backend.runtime import TaskProgram
from splitup.core.tensors import array_to_bytes
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import NetworkSource, TaskSource, get_task_key, get_weights_key
from splitup.graph.manifest_rules import load_manifest

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
MODEL: Final = EXAMPLES / "packages-4m"
ADAPTER: Final = EXAMPLES / "packages-4m-python-docs"
SAMPLE: Final = ADAPTER / "sample.txt"
_CHUNK: Final = 64
_CONTEXT: Final = 192  # tokens of one window
_TASK_BYTES: Final = 10**9
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gain:
    """Nats per token without the adapter, with it, and with it under encryption."""

    tokens: int
    without: float
    plain: float
    encrypted: float


class ExampleStates:
    """Computes the final hidden states of the example model."""

    def __init__(self) -> None:
        compiled = build(str(MODEL), _TASK_BYTES, sizes=Sizes(chunk=_CHUNK), private=0)
        self._manifest = load_manifest(compiled.manifest_bytes)
        assert self._manifest.client is not None
        self._embed = self._manifest.client.tasks[0]
        self._programs = [_load(compiled, task) for task in (self._embed, *self._manifest.tasks)]

    def compute(self, tokens: list[int]) -> Floats:
        """Return the final hidden states [tokens, d] of one window."""
        states = [program.new_state() for program in self._programs]
        return np.concatenate(
            [
                self._step(states, tokens[start : start + _CHUNK], start)
                for start in range(0, len(tokens), _CHUNK)
            ]
        )

    def _step(self, states: list[Any], tokens: list[int], start: int) -> Floats:
        arrays = make_arrays(make_causal_step(tokens, start), _CHUNK)
        manifest = self._manifest
        assert manifest.client is not None
        given = {
            port.name: array_to_bytes(port.spec, arrays[port.name])
            for port in manifest.client.inputs
        }
        [embedded] = self._programs[0].run(states[0], [given["tokens"]])
        sent = {
            port.name: embedded if isinstance(origin, TaskSource) else given[origin.input]
            for port, origin in zip(manifest.inputs, manifest.client.sends, strict=True)
        }
        made: dict[tuple[int, int], Any] = {}
        for index, task in enumerate(manifest.tasks):
            data = []
            for port in task.inputs:
                source = port.source
                assert not isinstance(source, NetworkSource)
                is_task = isinstance(source, TaskSource)
                data.append(made[source.task, source.port] if is_task else sent[source.input])
            for place, value in enumerate(self._programs[index + 1].run(states[index + 1], data)):
                made[index, place] = value
        [output] = manifest.outputs
        values = np.frombuffer(made[output.task, output.port], np.float32)
        return values.reshape(len(tokens), -1).astype(np.float64)


def measure_gain(adapter: Adapter, text: str, most: int = 10**9) -> Gain:
    """Return the gain on at most this many tokens of a text."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids[:most]
    weights = load_file(MODEL / "model.safetensors")
    norm = weights["model.norm.weight"].astype(np.float64)
    head = weights["model.embed_tokens.weight"].astype(np.float64)

    def compute_loss(hidden: Floats, wanted: list[int]) -> float:
        scaled = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-6) * norm
        logits = scaled @ head.T
        logits -= logits.max(1, keepdims=True)
        chosen = logits[np.arange(len(wanted)), wanted]
        return float((np.log(np.exp(logits).sum(1)) - chosen).sum())

    model, encrypt = ExampleStates(), make_encrypted(adapter)
    sums = np.zeros(3)
    for start in range(0, len(tokens), _CONTEXT):
        window = tokens[start : start + _CONTEXT]
        hidden = model.compute([0, *window[:-1]])
        added = np.stack([encrypt(row) for row in hidden])
        changed = (hidden, hidden + adapter.compute(hidden), hidden + added)
        sums += [compute_loss(states, window) for states in changed]
    return Gain(len(tokens), *(sums / len(tokens)).tolist())


def make_encrypted(adapter: Adapter) -> Any:
    """Return a function that applies an adapter under encryption, in this process."""
    layout, keys = get_layout(adapter.info), ClientKeys(adapter.info.parameters)
    host = Evaluation(layout, adapter.a, adapter.b, get_total_bits(adapter.info))
    host.load_keys(keys.make_rotation_keys(layout.steps))

    def apply(hidden: Floats) -> Floats:
        length = np.linalg.norm(hidden)
        answer, _ = host.apply(keys.encrypt(layout.pack(hidden / length)))
        return layout.unpack(keys.decrypt(answer)) * (2.0**adapter.info.answer_bits * length)

    return apply


def _load(compiled: CompiledModel, task: Any) -> TaskProgram:
    stored = {blob.key: blob for blob in compiled.blobs}
    graph = b"".join(stored[get_task_key(task.task_id)].open())
    weights = b"".join(stored[get_weights_key(task.weights_digest)].open())
    return TaskProgram(graph, weights, is_foreign=False)


def main() -> None:
    """Measure the named texts."""
    for path in map(Path, sys.argv[1:] or [SAMPLE]):
        print(json.dumps(asdict(measure_gain(load_adapter(ADAPTER), path.read_text()))))


if __name__ == "__main__":
    main()
