"""What reads strangers' bytes, real examples for each, and how these are damaged.

A target takes bytes and either returns or raises the error for bad input. Anything else is a find:
another exception, a warning, a refusal that takes more than ``LIMIT_S``, a message that is not
plain text, or accepted bytes that are not what the rules say of them.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.gguf.load import load_gguf
from splitup_deploy.frontends.huggingface.checkpoint import read_json
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.onnx.model_file import load_onnx
from splitup_deploy.frontends.pytorch.state_files import read_state_file
from splitup_deploy.frontends.source_model import Sizes

from splitup.core import tuning
from splitup.core.codec import encode_canonical
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import parse_safetensors
from splitup.graph.manifest import get_task_key
from splitup.graph.manifest_rules import load_manifest
from splitup.graph.rules import load_graph
from tests.deploy import converted, encoderggufs, hybrids, mixtures
from tests.deploy.checkpoints import CASES, GOLDEN, save_safetensors
from tests.deploy.converted import save_converted
from tests.deploy.ggufs import save_gguf, save_mixture
from tests.deploy.hybridggufs import save_hybrid
from tests.deploy.llamas import EXAMPLE
from tests.deploy.moes import MIXTRAL
from tests.deploy.onnxes import save_vision

CORPUS: Final = Path(__file__).parent / "corpus"
LIMIT_S: Final = 1.0  # of CPU time
_WORDS: Final = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, 0, 1, -1, 2**31, 2**53, 2**64, 10**400, 1.5, "", "0", "-1", "\x00", "é"),
    *([], {}, [[]], [0] * 70, ["a"], "9" * 400, "A", {"": 0}),
)
_SMALL: Final = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
}


@dataclass(frozen=True, slots=True)
class Target:
    """``seeds`` are real files, ``read`` takes a file; texts are damaged as values of JSON."""

    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], None]
    is_json: bool = False


class Find(Exception):
    """What a target did that it must not do."""


@cache
def _compile_example() -> tuple[bytes, tuple[bytes, ...]]:
    compiled = build(str(EXAMPLE), 1_300_000, sizes=Sizes(chunk=8), private=1)
    stored = {blob.key: blob for blob in compiled.blobs}
    keys = [get_task_key(task.task_id) for task in compiled.manifest.tasks[:2]]
    return compiled.manifest_bytes, tuple(b"".join(stored[key].open()) for key in keys)


@cache
def _write(kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / kind
        if kind == "gguf":
            save_gguf(path, _SMALL)
        elif kind == "gguf with experts":
            forms = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "Q8_0")
            save_gguf(path, {**MIXTRAL, "num_hidden_layers": 1}, forms=forms)
        elif kind == "gguf with compressed attention":
            save_mixture(path, mixtures.CASES["deepseek-v3"])
        elif kind == "gguf with recurrent layers":
            save_hybrid(path, hybrids.CASES["qwen3.5-moe"])
        elif kind == "gguf with decay by channel":
            save_hybrid(path, hybrids.CASES["kimi-linear"])
        elif kind.removeprefix("gguf of ") in converted.CASES:
            name = kind.removeprefix("gguf of ")
            context = {f"{converted.FAMILIES[name]}.context_length": 32}
            save_converted(path, name, converted.CASES[name], context)
        elif kind.removeprefix("gguf of ") in encoderggufs.CASES:
            encoderggufs.save_encoder_gguf(path, kind.removeprefix("gguf of "))
        elif kind == "onnx":
            save_vision(path)
        else:
            save_safetensors(path, CASES["qwen2"])
        return path.read_bytes()


def _read_graph(path: Path) -> None:
    data = path.read_bytes()
    if load_graph(data).to_bytes() != data:
        raise Find("a graph with two spellings")


def _read_manifest(path: Path) -> None:
    data = path.read_bytes()
    if load_manifest(data).to_bytes() != data:
        raise Find("a manifest with two spellings")


def _read_safetensors(path: Path) -> None:
    data = path.read_bytes()
    for tensor in parse_safetensors(data).values():
        if not 8 <= tensor.start <= tensor.end <= len(data):
            raise Find("a tensor outside its file")


def _read_state(path: Path) -> None:
    for source in read_state_file(path).values():
        if sum(len(chunk) for chunk in source.read()) != source.spec.nbytes:
            raise Find("a tensor of another size than it says")


def _read_config(path: Path) -> None:
    parse_config(read_json(path, tuning.MAX_CONFIG_BYTES), None)


_GGUF_PARTS: Final = (
    "experts",
    "compressed attention",
    "recurrent layers",
    "decay by channel",
)
_GGUF_FAMILIES: Final = (
    *("bert", "xlm-roberta-ranker", "modernbert"),
    *("gemma4-e", "gemma4-moe", "nemotron-h", "nemotron-3"),
)
TARGETS: Final[dict[str, Target]] = {
    "config": Target(
        lambda: [
            json.dumps(case.config).encode()
            for cases in (CASES, mixtures.CASES, hybrids.CASES)
            for case in cases.values()
        ],
        _read_config,
        is_json=True,
    ),
    "gguf": Target(
        lambda: [
            _write("gguf"),
            *(_write(f"gguf with {what}") for what in _GGUF_PARTS),
            *(_write(f"gguf of {name}") for name in _GGUF_FAMILIES),
        ],
        lambda path: _use(load_gguf, path),
    ),
    "graph": Target(lambda: _compile_example()[1], _read_graph, is_json=True),
    "manifest": Target(lambda: [_compile_example()[0]], _read_manifest, is_json=True),
    "onnx": Target(lambda: [_write("onnx")], lambda path: _use(load_onnx, path)),
    "safetensors": Target(lambda: [_write("safetensors")], _read_safetensors),
    "state": Target(
        lambda: [path.read_bytes() for path in sorted(GOLDEN.glob("state.*"))], _read_state
    ),
}


def _use(load: Callable[[str, Sizes], Any], path: Path) -> None:
    load(str(path), Sizes())


def damage(name: str, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one of the seeds with up to four changes."""
    data = chance.choice(seeds)
    if TARGETS[name].is_json and chance.random() < 0.8:
        value = json.loads(data)
        for _ in range(chance.randint(1, 4)):
            value = _change_value(value, chance)
        try:
            return encode_canonical(value)
        except (InvalidInput, TypeError, ValueError):  # floats, and integers that are too large
            return json.dumps(value).encode()
    mutant = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        _change_bytes(mutant, chance)
    return bytes(mutant)


def _change_value(root: Any, chance: random.Random) -> Any:
    """Change one place of a JSON value, deep ones as likely as flat ones."""
    places = list(_walk(root))
    holder, key = chance.choice(places)
    match chance.randrange(4):
        case 0:
            del holder[key]
        case 1:
            other, place = chance.choice(places)
            holder[key] = json.loads(json.dumps(other[place]))
        case 2 if isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        case 3 if type(holder[key]) is int:
            holder[key] += chance.choice((-1, 1, 2**31, -(2**31)))
        case _:
            holder[key] = json.loads(json.dumps(chance.choice(_VALUES)))  # a copy of its own
    return root


def _walk(value: Any) -> Iterator[tuple[Any, Any]]:
    pending = [value]
    while pending:
        holder = pending.pop()
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                pending.append(holder[key])
    if not value:
        yield [value], 0


def _change_bytes(mutant: bytearray, chance: random.Random) -> None:
    size = len(mutant) if chance.random() < 0.5 else min(len(mutant), 512)  # headers matter most
    at = chance.randrange(size + 1)
    match chance.randrange(6):
        case 0:
            mutant[at : at + 1] = bytes([chance.randrange(256)])
        case 1:
            mutant[at : at + 8] = struct.pack("<Q", chance.choice(_WORDS))
        case 2:
            mutant[at : at + 4] = struct.pack("<Q", chance.choice(_WORDS))[:4]
        case 3:
            del mutant[at : at + chance.randint(1, 16)]
        case 4:
            mutant[at:at] = chance.randbytes(chance.randint(1, 16))
        case _:
            start = chance.randrange(size + 1)
            mutant[at:at] = mutant[start : start + chance.randint(1, 64)]


def try_bytes(name: str, data: bytes, folder: Path, limit_s: float = LIMIT_S) -> bool:
    """Say whether a target accepts these bytes; raises Find, also when refusing takes too long."""
    path = folder / f"input.{name}"
    path.write_bytes(data)
    begun, accepted = time.thread_time(), True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            TARGETS[name].read(path)
        except (InvalidModel, InvalidInput) as error:
            accepted = False
            if not str(error).isprintable():
                raise Find(f"an error that moves the cursor: {error!r:.200}") from None
        except Find:
            raise
        except Exception as error:
            raise Find(f"{type(error).__name__}: {error!s:.200}") from error
    used = time.thread_time() - begun
    if not accepted and used > limit_s:
        raise Find(f"{used:.1f} s of CPU time")
    return accepted
