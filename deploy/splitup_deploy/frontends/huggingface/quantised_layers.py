"""The quantised layers of a Hugging Face directory, as blocks that the graph dequantises.

Such a directory stores the numbers, scales and zero points of a layer in tensors of their own. They
become blocks (``splitup_deploy.frontends.decoder.quantised``) while they are read, without rounding
anything; so a weight takes as much memory as in the file, and a little for scales that are shared
by more elements than a block has. Only weights are quantised: what a configuration says of
activations is for kernels that multiply them in fewer bits, and is not used.

Sources: quantizers of transformers (``fp8``: integrations/finegrained_fp8.py); the
compressed-tensors package (compressors/pack_quantized); GPTQ, arXiv 2210.17323, as AutoGPTQ packs
it; AWQ, arXiv 2306.00978, with the "gemm" packing of AutoAWQ; MXFP4, OCP Microscaling Formats (MX),
version 1.0, as gpt-oss orders it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from glob import escape
from itertools import product
from typing import Any, Final

import numpy as np

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.quantised import count_bytes
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.weight_sources import Absent, WeightSource, select

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, WeightSource]

_BLOCK: Final = 128  # elements at most: a kernel reads a block whole, and its scale is small in it
_READ_ELEMENTS: Final = 2**22  # made at a time
_SCALES: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of eight neighbours is
# Numbers of activations, which stay float32 here.
_OF_ACTIVATIONS: Final = re.compile(r".*_proj\.(activation_scale|input_scale|output_scale)")
# Modules that are quantised, for a preview without weights: those that a decoder's blocks have.
_PROJECTION: Final = re.compile(r"model\.layers\..*(_proj|\.w[123])\.weight")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised weight, and the shape of the matrix that its blocks stand for."""

    source: WeightSource
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of blocks that are made from a layer's tensors, some rows at a time."""

    rows: int
    at_once: int
    make: Callable[[int, int], Array]  # the first row, how many -> uint8 [rows, blocks, bytes]

    def read(self) -> Iterator[bytes]:
        """Yield the rows in order."""
        for first in range(0, self.rows, self.at_once):
            yield self.make(first, min(self.at_once, self.rows - first)).tobytes()


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer [rows, columns]: functions of the first row and how many give its parts.

    ``numbers``: bytes, or nibbles, one a byte [rows, columns]. ``scales`` and ``zeros``: one for
    every ``group`` columns; scales are the bits of ``scale`` numbers, or bytes where ``kind`` says
    what they mean. ``at_once``: rows to read at a time. ``experts``: how many layers the rows are
    of, if the layer is a bank.
    """

    rows: int
    columns: int
    group: int
    kind: str
    scale: str
    numbers: Callable[[int, int], Array]
    scales: Callable[[int, int], Array]
    zeros: Callable[[int, int], Array] | None = None
    at_once: int = 0
    experts: int = 0

    def take(self, expert: int) -> _Layer:
        """Return the layer of one expert of a bank."""
        rows = self.rows // self.experts
        start = expert * rows
        return replace(
            self,
            rows=rows,
            experts=0,
            numbers=lambda first, count: self.numbers(start + first, count),
            scales=lambda first, count: self.scales(start + first, count),
        )

    def make_source(self, name: str) -> Quantised:
        """Return the layer as blocks."""
        elements = math.gcd(self.columns, self.group, _BLOCK)
        if elements % 2:
            raise InvalidModel(
                f"'{name}' is quantised in groups of {self.group} of {self.columns} columns; an "
                "even number that divides them is wanted"
            )
        count, encoding = self.columns // elements, f"{self.kind}_{self.scale}".rstrip("_")

        def make(first: int, rows: int) -> Array:
            group_of = np.arange(count) * elements // self.group
            q = self.numbers(first, rows).reshape(rows, count, elements)
            if self.kind.endswith("4"):
                half = elements // 2
                q = q[..., :half] | q[..., half:] << 4
            scale = np.ascontiguousarray(self.scales(first, rows)[:, group_of])
            parts = [scale.view(np.uint8).reshape(rows, count, -1), q]
            if self.zeros is not None:
                parts.insert(1, self.zeros(first, rows)[:, group_of, None])
            return np.concatenate(parts, -1)

        at_once = self.at_once or max(1, _READ_ELEMENTS // self.columns)
        shape = (self.rows, count, count_bytes(encoding, elements))
        part = BlockRows(self.rows, at_once, make)
        source = WeightSource(TensorSpec(name, "uint8", shape), (part,), encoding)
        return Quantised(source, (self.rows, self.columns))


class QuantisationConfig:
    """The ``quantization_config`` of a config.json; raises InvalidModel for what is not known."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.fields = Fields(table, "config.json's quantization_config")
        self.method: Any = self.fields.get("quant_method")
        if self.method not in list(_METHODS):
            raise self.fields.refuse("quant_method", ", ".join(_METHODS))
        self.fields.skip(*_HARMLESS)
        self._find = _METHODS[self.method](self.fields)
        skipped = [self.fields.get(key, []) for key in ("modules_to_not_convert", "ignore")]
        self._skipped = [str(one) for names in skipped for one in names]
        self.fields.check_all_read()

    def find_layers(self, tensors: Tensors) -> tuple[dict[str, Quantised], set[str]]:
        """Return the quantised weights by name, and the names of the tensors that they are of."""
        found: dict[str, Quantised] = {}
        used = {name for name in tensors if _OF_ACTIVATIONS.fullmatch(name)}
        for name in tensors:
            stem, dot, kind = name.rpartition(".")
            if not dot or (layer := self._find(tensors, stem, kind)) is None:
                continue
            used |= {f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in tensors}
            if not layer.experts:
                found[f"{stem}.weight"] = layer.make_source(f"{stem}.weight")
            for expert in range(layer.experts):
                one = f"{stem}.{expert}.{kind.removesuffix('_blocks')}.weight"
                found[one] = layer.take(expert).make_source(one)
        return found, used

    def make_shape(self, name: str, rows: int, columns: int, dtype: str) -> WeightSource | None:
        """Return a weight of which only the shape is known; None where it is not quantised."""
        if _PROJECTION.fullmatch(name) is None or self._is_skipped(name.rpartition(".")[0]):
            return None
        kind, group = _find_form(self.fields, self.method)
        usual = {"fp8": "F32", "gptq": "F16", "awq": "F16", "mxfp4": ""}
        scale = usual.get(self.method, _SCALES[dtype])
        layer = _Layer(rows, columns, group or columns, kind, scale, _make_none, _make_none)
        return replace(layer.make_source(name).source, parts=(Absent(),))

    def _is_skipped(self, module: str) -> bool:
        return any(fnmatch(module, one) for one in self._globs)

    @cached_property
    def _globs(self) -> list[str]:
        return [glob for name in self._skipped for glob in _read_name(name)]


# what regular expressions of modules are made of: "re:.*mlp\\.(gate|up)_proj$"
_PIECE: Final = re.compile(r"\.\*|\\?\.|[\w-]+|\([\w|-]+\)")
_GLOBS: Final = {".*": "*", ".": "?", "\\.": "."}
_MOST_GLOBS: Final = 64  # of one of them


def _read_name(name: str) -> list[str]:
    """Return the globs of modules that a name, or a regular expression, stands for.

    Python's regular expressions may take forever, and its globs do not. Raises InvalidModel.
    """
    if not name.startswith("re:"):
        return [f"*{escape(name)}*", f"{name}*"]
    body = name.removeprefix("re:").removeprefix("^")
    pieces = _PIECE.findall(body.removesuffix("$"))
    choices = [_GLOBS.get(one, one.strip("()")).split("|") for one in pieces]
    if "".join(pieces) != body.removesuffix("$") or math.prod(map(len, choices)) > _MOST_GLOBS:
        raise InvalidModel(
            f"config.json's quantization_config leaves out modules by {name!r:.80}, which has more "
            "than names, '.', '.*' and (one|another): fetch the weights as well, which say it, too"
        )
    return ["".join(one) + "*" * (body[-1:] != "$") for one in product(*choices)]


_Find = Callable[[Tensors, str, str], _Layer | None]
_PARTS: Final = (
    *("weight", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_packed"),
    *("weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx"),
    *("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
)
# What the authors of a checkpoint did, and which kernels are to be used.
_HARMLESS: Final = tuple(
    """
    activation_scheme scale_fmt dequantize fmt quantization_status global_compression_ratio version
    damp_percent damp_auto_increment static_groups true_sequential model_name_or_path
    model_file_base_name tokenizer dataset backend exllama_config use_exllama disable_exllama
    max_input_length cache_block_outputs meta quantizer batch_size pad_token_id sym
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    do_fuse fuse_max_seq_len modules_to_fuse mse act_group_aware desc_act_scope
    """.split()
)


def _make_none(first: int, rows: int) -> Array:
    return np.empty((rows, 0))


def _refuse_layer(stem: str, problem: str) -> InvalidModel:
    return InvalidModel(f"the quantised layer '{stem:.100}' {problem}")


def _read(source: WeightSource, first: int, count: int, dtype: str) -> Array:
    """Return rows of a matrix."""
    columns = source.spec.shape[1]
    data = b"".join(select(source, "", ((first, count), (0, columns))).read())
    return np.frombuffer(data, dtype).reshape(count, columns)


def _unpack(words: Array, bits: int) -> Array:
    """Return the numbers in words [rows, n], the lowest bits first: [rows, n * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    return numbers.astype(np.uint8).reshape(len(words), -1)


def _get_scale_kind(stem: str, scale: WeightSource) -> tuple[str, str]:
    """Return the name of a scale's dtype, and numpy's for its bits."""
    dtype = scale.spec.dtype
    if dtype not in _SCALES:
        raise _refuse_layer(stem, f"has scales of {dtype}; {', '.join(_SCALES)} are supported")
    return _SCALES[dtype], "<u4" if dtype == "float32" else "<u2"


def _as_matrix(source: WeightSource, rows: int, columns: int) -> WeightSource:
    return replace(source, spec=replace(source.spec, shape=(rows, columns)))


# ---- one scale for a block of rows and columns ---------------------------------------------------


def _make_scaled(stem: str, kind: str, numbers: WeightSource, scale: WeightSource) -> _Layer:
    """Return a layer of bytes whose scales [row blocks, column blocks] are of equal blocks."""
    rows, columns = numbers.spec.shape
    high, wide = {0: (1, 1), 1: (*scale.spec.shape, 1)}.get(len(scale.spec.shape), scale.spec.shape)
    heights = [n for n in (1, _BLOCK, rows) if math.ceil(rows / n) == high]
    widths = [n for n in (columns, _BLOCK, *_GROUPS) if math.ceil(columns / n) == wide]
    if not heights or not widths:
        raise _refuse_layer(
            stem, f"is [{rows}, {columns}] with scales {list(scale.spec.shape)}, which do not fit"
        )
    height = heights[-1] if high == 1 else heights[0]
    name, dtype = _get_scale_kind(stem, scale)
    numbers = replace(numbers, spec=replace(numbers.spec, dtype="uint8"))
    scale = _as_matrix(scale, high, wide)

    def read_scales(first: int, count: int) -> Array:
        low = first // height
        found = _read(scale, low, (first + count - 1) // height + 1 - low, dtype)
        return found[np.arange(first, first + count) // height - low]

    return _Layer(
        rows,
        columns,
        widths[0],
        kind,
        name,
        lambda first, count: _read(numbers, first, count, "u1"),
        read_scales,
    )


_GROUPS: Final = (32, 64, 256, 512, 16)


def _read_fp8(fields: Fields) -> _Find:
    """Read ``fp8``: float8 in blocks of 128 rows and columns, as DeepSeek-V3, or with one scale."""
    size = fields.get("weight_block_size")
    if size not in (None, [_BLOCK, _BLOCK]):
        raise fields.refuse("weight_block_size", f"[{_BLOCK}, {_BLOCK}] or null")
    fields.expect("fmt", "e4m3")

    def find(tensors: Tensors, stem: str, kind: str) -> _Layer | None:
        numbers = tensors.get(f"{stem}.weight")
        if kind != "weight_scale_inv" or numbers is None or len(numbers.spec.shape) != 2:
            return None
        return _make_scaled(stem, "F8", numbers, tensors[f"{stem}.{kind}"])

    return find


# ---- compressed-tensors --------------------------------------------------------------------------


def _read_compressed(fields: Fields) -> _Find:
    """Read ``compressed-tensors``: int4 and int8 in words, int8, and float8."""
    fields.expect("kv_cache_scheme", None)
    for key in ("sparsity_config", "transform_config"):
        value = fields.get(key)
        if value and value != {"format": "dense"}:
            raise fields.refuse(key, "null")
    whole = fields.get("format")
    groups = fields.get_fields("config_groups")
    names = fields.get("config_groups", {})
    if groups is None or not names:
        raise fields.refuse("config_groups", "an object")
    for name in names:
        group = groups.get_fields(name)
        weights = None if group is None else group.get_fields("weights")
        if group is None or weights is None:
            continue
        form = group.get("format", whole)
        if form not in _COMPRESSED:
            raise InvalidModel(
                f"config.json's quantization_config has the format {form!r:.40}; supported: "
                f"{', '.join(_COMPRESSED)}"
            )
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if (bits, kind) not in ((4, "int"), (8, "int"), (8, "float")):
            raise weights.refuse("num_bits", "4 or 8 of the type int, 8 of the type float")
    return _find_compressed


_COMPRESSED: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _find_compressed(tensors: Tensors, stem: str, kind: str) -> _Layer | None:
    if kind != "weight_scale":
        return None
    scale = tensors[f"{stem}.{kind}"]
    if f"{stem}.weight_g_idx" in tensors:
        raise _refuse_layer(stem, "has columns in another order (weight_g_idx): not supported")
    if (words := tensors.get(f"{stem}.weight_packed")) is not None:
        return _make_packed(tensors, stem, words, scale)
    numbers = tensors.get(f"{stem}.weight")
    if numbers is None or len(numbers.spec.shape) != 2:
        return None
    kinds = {"int8": "I8", "float8_e4m3fn": "F8"}
    if numbers.spec.dtype not in kinds:
        raise _refuse_layer(stem, f"has numbers of {numbers.spec.dtype}: not supported")
    if f"{stem}.weight_zero_point" in tensors:
        raise _refuse_layer(stem, "has int8 numbers with zero points: not supported")
    return _make_scaled(stem, kinds[numbers.spec.dtype], numbers, scale)


def _make_packed(tensors: Tensors, stem: str, words: WeightSource, scale: WeightSource) -> _Layer:
    """Return a layer of which each row is words, and each column of zero points as well."""
    shape = tensors.get(f"{stem}.weight_shape")
    if shape is None or shape.spec != replace(shape.spec, dtype="int64", shape=(2,)):
        raise _refuse_layer(stem, "has no weight_shape of two integers")
    rows, columns = np.frombuffer(b"".join(shape.read()), "<i8").tolist()
    wanted = {bits: (rows, columns * bits // 32) for bits in (4, 8) if columns * bits % 32 == 0}
    bits = next((bits for bits, size in wanted.items() if words.spec.shape == size), 0)
    groups = scale.spec.shape[1] if len(scale.spec.shape) == 2 else 0
    is_known = bits and words.spec.dtype == "int32" and scale.spec.shape == (rows, groups)
    if not is_known or groups < 1 or columns % groups:
        raise _refuse_layer(
            stem,
            f"is [{rows}, {columns}] in {words.spec} with scales {list(scale.spec.shape)}: "
            "not supported",
        )
    name, dtype = _get_scale_kind(stem, scale)
    zeros = tensors.get(f"{stem}.weight_zero_point")
    read_zeros = None
    if zeros is not None:
        if zeros.spec != replace(zeros.spec, dtype="int32", shape=(rows * bits // 32, groups)):
            raise _refuse_layer(stem, f"has zero points {zeros.spec}: not supported")

        def read_zeros(first: int, count: int) -> Array:
            per_word = 32 // bits
            low = first // per_word
            packed = _read(zeros, low, (first + count - 1) // per_word + 1 - low, "<u4")
            each = _unpack(np.ascontiguousarray(packed.T), bits).T
            return each[first - low * per_word :][:count]

    def read_numbers(first: int, count: int) -> Array:
        found = _unpack(_read(words, first, count, "<u4"), bits)
        return found ^ np.uint8(128) if bits == 8 and zeros is None else found

    return _Layer(
        rows,
        columns,
        columns // groups,
        f"{'I' if zeros is None else 'U'}{bits}",
        name,
        read_numbers,
        lambda first, count: _read(scale, first, count, dtype),
        read_zeros,
    )


# ---- GPTQ and AWQ --------------------------------------------------------------------------------


def _read_gptq(fields: Fields) -> _Find:
    """Read ``gptq``: words of neighbouring inputs, with the groups in the order of the inputs."""
    bits, group = fields.get_integer("bits"), fields.get("group_size")
    if bits not in (4, 8):
        raise fields.refuse("bits", "4, 8")
    if fields.get_flag("desc_act", False) and group != -1:
        raise fields.refuse("desc_act", "false: groups of inputs in another order are not")
    form = fields.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fields.refuse("checkpoint_format", "gptq, gptq_v2")
    fields.expect_all({"is_marlin_format": False, "lm_head": False, "pack_dtype": "int32"})
    fields.expect_all(dict.fromkeys(("dynamic", "adapter", "rotation")))
    added = 1 if form == "gptq" else 0

    def unpack(words: Array) -> Array:
        return _unpack(np.ascontiguousarray(words.T), bits).T

    def find(tensors: Tensors, stem: str, kind: str) -> _Layer | None:
        if kind != "qweight":
            return None
        height, columns = tensors[f"{stem}.{kind}"].spec.shape or (0, 0)
        inner = height * 32 // bits
        order = tensors.get(f"{stem}.g_idx")
        return _make_turned(
            tensors, stem, (columns, inner), bits, unpack, lambda z: _unpack(z, bits), added, order
        )

    return find


def _read_awq(fields: Fields) -> _Find:
    """Read ``awq`` in its usual packing: words of eight outputs in an order of their own."""
    fields.expect_all({"bits": 4, "w_bit": 4, "zero_point": True})
    fields.skip("group_size", "q_group_size")
    form = fields.get("version", "gemm")
    if not isinstance(form, str) or form.lower() != "gemm":
        raise fields.refuse("version", "gemm")

    def unpack(words: Array) -> Array:
        each = _unpack(words, 4).reshape(len(words), -1, 8)
        return each[:, :, _AWQ_ORDER].reshape(len(words), -1)

    def find(tensors: Tensors, stem: str, kind: str) -> _Layer | None:
        if kind != "qweight":
            return None
        inner, width = tensors[f"{stem}.{kind}"].spec.shape or (0, 0)
        return _make_turned(tensors, stem, (width * 8, inner), 4, unpack, unpack, 0, None)

    return find


def _make_turned(
    tensors: Tensors,
    stem: str,
    shape: tuple[int, int],
    bits: int,
    unpack: Callable[[Array], Array],
    unpack_zeros: Callable[[Array], Array],
    added: int,
    order: WeightSource | None,
) -> _Layer:
    """Return a layer that is stored by inputs: it is read whole, and turned in memory.

    ``added`` to the stored zero points gives theirs. ``order`` says which group an input is of.
    """
    parts = {part: tensors.get(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales")}
    words, zeros, scale = parts.values()
    rows, columns = shape
    if words is None or zeros is None or scale is None or len(scale.spec.shape) != 2:
        raise _refuse_layer(stem, "lacks qzeros or scales")
    groups = scale.spec.shape[0]
    fits = groups and columns % groups == 0 and scale.spec.shape == (groups, rows)
    is_word = words.spec.dtype == zeros.spec.dtype == "int32"
    if not fits or not is_word or zeros.spec.shape != (groups, rows * bits // 32):
        raise _refuse_layer(
            stem, f"is {words.spec} with scales {scale.spec} and zero points {zeros.spec}"
        )
    if rows * columns > limits.MAX_TENSOR_BYTES // 4:
        raise _refuse_layer(stem, f"has {rows} x {columns} elements: too many to turn in memory")
    name, dtype = _get_scale_kind(stem, scale)
    group = columns // groups

    def read_numbers(first: int, count: int) -> Array:
        if order is not None:
            found = np.frombuffer(b"".join(order.read()), "<i4")
            if not np.array_equal(found, np.arange(columns) // group):
                raise _refuse_layer(stem, "has inputs in another order (g_idx): not supported")
        return unpack(_read(words, 0, words.spec.shape[0], "<u4")).T

    return _Layer(
        rows,
        columns,
        group,
        f"U{bits}",
        name,
        read_numbers,
        lambda first, count: _read(scale, 0, groups, dtype).T,
        lambda first, count: (
            (unpack_zeros(_read(zeros, 0, groups, "<u4")).T + added) & (2**bits - 1)
        ).astype(np.uint8),
        at_once=rows,
    )


# ---- MXFP4 ---------------------------------------------------------------------------------------


def _read_mxfp4(fields: Fields) -> _Find:
    """Read ``mxfp4`` as of gpt-oss: banks of experts, in blocks of 32 with a byte for the scale."""

    def find(tensors: Tensors, stem: str, kind: str) -> _Layer | None:
        if not kind.endswith("_blocks"):
            return None
        blocks, scale = tensors[f"{stem}.{kind}"], tensors.get(f"{stem}.{kind[:-6]}scales")
        *outer, size = blocks.spec.shape or (0,)
        is_byte = scale is not None and blocks.spec.dtype == scale.spec.dtype == "uint8"
        if scale is None or not is_byte or len(outer) != 3 or 0 in outer or size != _MX_BLOCK // 2:
            raise _refuse_layer(f"{stem}.{kind}", f"is {blocks.spec}: not supported")
        if list(scale.spec.shape) != outer:
            raise _refuse_layer(f"{stem}.{kind}", f"is {blocks.spec} with scales {scale.spec}")
        experts, high, groups = outer
        rows, columns = experts * high, groups * _MX_BLOCK
        numbers, scales = _as_matrix(blocks, rows, columns // 2), _as_matrix(scale, rows, groups)

        def read_numbers(first: int, count: int) -> Array:
            pairs = _read(numbers, first, count, "u1")
            return np.stack([pairs & 15, pairs >> 4], -1).reshape(count, columns)

        def read_scales(first: int, count: int) -> Array:
            return _read(scales, first, count, "u1")

        return _Layer(
            rows, columns, _MX_BLOCK, "MXFP4", "", read_numbers, read_scales, experts=experts
        )

    return find


_MX_BLOCK: Final = 32

_METHODS: Final[dict[Any, Callable[[Fields], _Find]]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": _read_mxfp4,
}


def _find_form(fields: Fields, method: str) -> tuple[str, int]:
    """Return the kind of numbers, and their group, that a configuration names first."""
    if method in ("gptq", "awq"):
        group = fields.get("group_size", fields.get("q_group_size", -1))
        return f"U{fields.get('bits', 4)}", max(group, 0)
    if method == "fp8":
        return "F8", _BLOCK
    if method == "mxfp4":
        return "MXFP4", _MX_BLOCK
    groups = fields.get("config_groups")
    weights = next(one["weights"] for one in groups.values() if one.get("weights"))
    letter = "F" if weights.get("type") == "float" else "I" if weights["symmetric"] else "U"
    return f"{letter}{weights['num_bits']}", weights.get("group_size") or 0
