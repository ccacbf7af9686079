"""The weights of a Hugging Face directory: in one file or in shards named by an index."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec, validate_safetensors
from splitup_deploy.frontends.huggingface.quantised_layers import QuantisationConfig, Quantised
from splitup_deploy.frontends.own_files import check_own
from splitup_deploy.frontends.pytorch.state_files import read_state_file
from splitup_deploy.frontends.recognition import STATE_SUFFIXES
from splitup_deploy.frontends.weight_sources import (
    FileSlice,
    StoredWeights,
    Turned,
    WeightSource,
    describe_left_out,
    select,
)

FLOAT_DTYPES: Final = ("float32", "float16", "bfloat16")

# Older versions stored these; they are computed from config.json, as Hugging Face does.
_DERIVED: Final = re.compile(r".*\.rotary_emb\.inv_freq")
_EXPERT: Final = re.compile(r"(.*\.experts)\.([0-9]+)\.(gate|up|gate_up|down)_proj\.weight")
_HALF: Final = re.compile(r"(.*\.)(gate|up)_proj\.weight")
# Saved by versions that rename the module of the experts in all blocks: module -> its other name.
_OTHER_NAME: Final = (".mlp.", ".block_sparse_moe.")


def read_weight_file(path: Path) -> dict[str, WeightSource]:
    """Return where every tensor of a safetensors file lies."""
    return {
        name: WeightSource(
            TensorSpec(name, tensor.dtype, tensor.shape),
            (FileSlice(path, tensor.start, tensor.end),),
        )
        for name, tensor in validate_safetensors(check_own(path)).items()
    }


# In the order of preference: a format that can hold nothing but tensors first.
_FORMATS: Final[tuple[tuple[str, Callable[[Path], dict[str, WeightSource]]], ...]] = (
    ("model.safetensors", read_weight_file),
    ("pytorch_model.bin", read_state_file),
)
_STATE_FILES: Final = tuple(f"*{suffix}" for suffix in STATE_SUFFIXES)


class DirectoryWeights(StoredWeights):
    """The tensors of a directory's weights files, by name."""

    def __init__(
        self,
        directory: Path,
        rename: Callable[[str], str] = str,
        quantisation: QuantisationConfig | None = None,
    ) -> None:
        self._directory = directory
        self._asked: set[str] = set()
        self._tensors: dict[str, WeightSource] = {}
        files, read = _find_files(directory)
        for path in files:
            for name, source in read(path).items():
                usual = rename(name)
                if usual in self._tensors:
                    raise InvalidModel(f"weight {name!r:.120} is in two files of '{directory}'")
                self._tensors[usual] = _name(source, usual)
        self._quantised: dict[str, Quantised] = {}
        if quantisation is not None:
            self._quantised, used = quantisation.find_layers(self._tensors)
            rest = {name: one for name, one in self._tensors.items() if name not in used}
            self._tensors = rest | {name: one.source for name, one in self._quantised.items()}
        module, other = _OTHER_NAME
        self._others = {name.replace(other, module): name for name in self._tensors}

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape."""
        found = self._find(name)
        if found not in self._tensors:
            for find in (self._find_in_bank, self._find_in_pair):
                if (source := find(name, shape)) is not None:
                    return source
            raise InvalidModel(f"'{self._directory}' has no weight '{name}' that config.json wants")
        self._asked.add(found)
        source = self._tensors[found]
        quantised = self._quantised.get(found)
        if quantised is not None and quantised.shape == shape:
            return _name(source, name)
        if source.spec.shape != shape or source.spec.dtype not in FLOAT_DTYPES:
            kind = source.spec if quantised is None else f"quantised{list(quantised.shape)}"
            raise InvalidModel(
                f"weight '{name}' in '{self._directory}' is {kind}; "
                f"config.json wants {list(shape)} in one of {', '.join(FLOAT_DTYPES)}"
            )
        return _name(source, name)

    def can_join(self, names: list[str]) -> bool:
        """Say whether these weights have the same storage format; ``get`` reports absent ones."""
        found = (self._tensors.get(self._find(name)) for name in names)
        return len({_get_storage(source) for source in found if source is not None}) <= 1

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return the weights (name, rows) concatenated along the rows, called ``name``."""
        sources = [self.get(part, rows, *shape[1:]) for part, rows in parts]
        if len({_get_storage(source) for source in sources}) != 1:
            dtypes = sorted({source.spec.dtype for source in sources})
            raise InvalidModel(f"the parts of '{name}' have different dtypes: {dtypes}")
        return super().join(name, parts, *shape)

    def change(
        self, name: str, shape: tuple[int, ...], change: Callable[[WeightSource], WeightSource]
    ) -> None:
        """Change a weight that must be there, in float32, float16 or bfloat16 and of a shape."""
        found = self._find(name)
        if found in self._quantised:
            raise InvalidModel(f"weight '{name}' is quantised: an adapter cannot be merged into it")
        source = self._tensors.get(found)
        if source is None:
            raise InvalidModel(f"'{self._directory}' has no weight '{name}' to be changed")
        if source.spec.shape != shape or source.spec.dtype not in FLOAT_DTYPES:
            raise InvalidModel(f"weight '{name}' is {source.spec}; the adapter is for {shape}")
        self._tensors[found] = change(source)

    def __contains__(self, name: str) -> bool:
        """Say whether a weight is there."""
        return name in self._tensors

    def stand_in(self, name: str, other: str) -> None:
        """Let a weight stand in for an absent one."""
        self._others[name] = other

    def is_copy(self, name: str, other: str) -> bool:
        """Say whether a weight has the bytes of another; then it counts as read."""
        if other not in self._tensors:
            return False
        one, two = self._tensors[name], self._tensors[other]
        is_same = (one.spec.dtype, one.spec.shape) == (two.spec.dtype, two.spec.shape)
        if is_same and one.parts != two.parts:
            is_same = all(map(operator.eq, one.read(), two.read()))
        if is_same:
            self._asked.add(name)
        return is_same

    def check_all_read(self, others: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
        """Return what to say of weights that were left out (``describe_left_out``)."""
        left = [name for name in self._tensors if name not in self._asked]
        derived = filter(_DERIVED.fullmatch, left)
        return describe_left_out(
            left,
            {**dict.fromkeys(derived, "computed from config.json"), **others},
            f"'{self._directory}' has a weight",
            "config.json has no use: the weights belong to another configuration or to an unknown "
            "variation",
        )

    def _find(self, name: str) -> str:
        """Return the name in the file of a weight."""
        return name if name in self._tensors else self._others.get(name, name)

    def _find_in_pair(self, name: str, shape: tuple[int, ...]) -> WeightSource | None:
        """Return the weight of a gate or up projection out of the weight of both."""
        match = _HALF.fullmatch(name)
        both = "" if match is None else f"{match[1]}gate_up_proj.weight"
        if match is None or both not in self._tensors:
            return None
        rows, columns = shape
        whole = self.get(both, 2 * rows, columns)
        start = rows if match[2] == "up" else 0
        return replace(select(whole, name, ((start, rows), (0, columns))), names=(both,))

    def _find_in_bank(self, name: str, shape: tuple[int, ...]) -> WeightSource | None:
        """Return an expert's weight out of the weight of all experts of a layer.

        Gate and up projection are neighbours there. Some models store every matrix transposed.
        """
        match = _EXPERT.fullmatch(name)
        if match is None or len(shape) != 2:
            return None
        experts, number, kind = match[1], int(match[2]), match[3]
        bank = f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj"
        if bank not in self._tensors:
            return None
        whole, (rows, columns) = self._tensors[bank], shape
        out, first = 2 * rows if kind in ("gate", "up") else rows, rows if kind == "up" else 0
        count, *matrix = whole.spec.shape or (0,)
        is_plain, is_turned = matrix == [out, columns], matrix == [columns, out]
        other = self._tensors.get(f"{experts}.gate_up_proj")
        if is_plain and is_turned and kind == "down" and other is not None:  # as the other is
            is_turned = other.spec.shape[1:] == (rows, 2 * rows)
            is_plain = other.spec.shape[1:] == (2 * rows, rows)
        is_huge = out * columns > limits.MAX_TENSOR_BYTES // 4  # it is turned in memory
        if is_plain == is_turned or number >= count or is_huge:
            raise InvalidModel(
                f"weight '{bank}' in '{self._directory}' is {whole.spec}; config.json wants "
                f"[experts, {out}, {columns}] or [experts, {columns}, {out}], which differ"
            )
        if whole.spec.dtype not in FLOAT_DTYPES:
            raise InvalidModel(f"weight '{bank}' is {whole.spec.dtype}, which is not supported")
        self._asked.add(bank)
        height = out if is_plain else columns
        spec = replace(whole.spec, shape=(count * height, *whole.spec.shape[2:]))
        start = number * height + (first if is_plain else 0)
        box = ((start, rows if is_plain else height), (0, whole.spec.shape[2]))
        source = select(replace(whole, spec=spec), name, box)
        if is_turned:
            turned = Turned(source, first, rows)
            source = WeightSource(replace(spec, name=name, shape=shape), (turned,))
        return replace(source, names=(bank,))


def _get_storage(source: WeightSource) -> tuple[object, ...]:
    """Return what weights must have in common to become one."""
    return source.spec.dtype, source.encoding, source.encoding and source.spec.shape[1:]


def _name(source: WeightSource, name: str) -> WeightSource:
    """Return a weight under another name; messages about its numbers keep its own."""
    if source.spec.name == name:
        return source
    own = source.names or (source.spec.name,)
    return replace(source, spec=replace(source.spec, name=name), names=own)


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return what ``read_json`` returns of a configuration, an empty object where there is none."""
    return read_json(path) if path.is_file() else {}


def read_json(path: Path, limit: int = tuning.MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``limit`` bytes; raises InvalidModel."""
    try:
        size = check_own(path).stat().st_size
        if size > limit:
            raise InvalidModel(f"'{path}' has {size} bytes; more than {limit} is no real one")
        value = parse_json(path.read_bytes(), max_values=size, max_growth=limits.DENSE_GROWTH)
    except OSError as error:
        raise InvalidModel(f"cannot read '{path}': {error.strerror}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidModel(f"'{path}' is no JSON object; fetch or export the model again")
    return value


def _find_files(
    directory: Path,
) -> tuple[list[Path], Callable[[Path], dict[str, WeightSource]]]:
    for name, read in _FORMATS:
        index = directory / f"{name}.index.json"
        if index.is_file():
            return [_check_file(directory, shard) for shard in _read_shards(index)], read
        if (directory / name).is_file():
            return [directory / name], read
    others = sorted(path for kind in _STATE_FILES for path in directory.glob(kind))
    if len(others) == 1:
        return others, read_state_file
    found = f"several of {', '.join(path.name for path in others)[:200]}" if others else "neither"
    raise InvalidModel(
        f"'{directory}' has no model.safetensors; weights must be in safetensors files, in "
        f"pytorch_model.bin or in one {', '.join(_STATE_FILES)} file, and it has {found}"
    )


def _check_file(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise InvalidModel(
            f"'{directory}' has no {name!r:.120}; its index names it: fetch it as well"
        )
    return path


def _read_shards(index: Path) -> list[str]:
    table = read_json(index, limits.MAX_SAFETENSORS_HEADER_BYTES).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise InvalidModel(f"'{index}' has no weight_map; export the model again")
    names = sorted(set(table.values()))
    if bad := [name for name in names if Path(name).name != name]:
        raise InvalidModel(f"'{index}' names a file outside the model's directory: {bad[0]!r:.80}")
    return names
