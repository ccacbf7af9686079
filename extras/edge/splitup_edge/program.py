"""An exported model: one .pte file with the program, the tokenizer, and what its steps look like.

The program's methods are static steps (``splitup_edge.static_step``) of ``rows`` rows each;
``splitup`` returns an ``EdgeInfo`` as JSON and ``tokenizer`` a tokenizer.json as uint8. The file is
read by native code of ExecuTorch: one of a stranger by ``splitup_edge.confined_program`` alone.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import ConfigurationError, InvalidInput, InvalidModel
from splitup.core.records import Record
from splitup.core.source_tree import compose_package_install
from splitup.graph.manifest import TextInfo
from splitup_edge.static_step import Arrays, StaticShape, keep_rows, make_static_inputs

INFO: Final = "splitup"
TOKENIZER: Final = "tokenizer"
_HEAD_BYTES: Final = 40  # of ExecuTorch's file format: offset, mark, extended header

Size = Annotated[int, Field(ge=1, le=limits.MAX_DIMENSION)]


class EdgeInfo(Record):
    """What a program's steps look like. ``methods``: the rows of each of its methods, by name."""

    version: Literal[1]
    layers: Annotated[int, Field(ge=1, le=limits.MAX_TASKS)]
    kv_heads: Size
    head_dim: Size
    max_len: Size
    windows: tuple[int, ...]
    dtype: Literal["float32", "float16"]
    methods: Annotated[dict[str, Size], Field(min_length=1, max_length=8)]
    text: TextInfo

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Bound what whoever runs the program holds for a step: its layout, and its logits."""
        nbytes = 4 * self.chunk * max(2 + 2 * self.chunk, self.text.vocab)
        if nbytes > limits.MAX_TENSOR_BYTES:
            raise ValueError(
                f"a step has arrays of {nbytes} bytes; the limit is {limits.MAX_TENSOR_BYTES}"
            )
        return self

    def make_shape(self, method: str) -> StaticShape:
        """Return the sizes of a method's step."""
        sizes = (self.layers, self.kv_heads, self.head_dim, self.max_len)
        return StaticShape(*sizes, self.methods[method], self.windows)

    @property
    def chunk(self) -> int:
        """Return the most rows of a step."""
        return max(self.methods.values())

    def choose_method(self, rows: int) -> str:
        """Return the method of the fewest rows that takes a step, or that of the most."""
        methods = sorted(self.methods, key=lambda name: self.methods[name])
        return next((name for name in methods if self.methods[name] >= rows), methods[-1])


class StepProgram(Protocol):
    """What computes static steps."""

    info: EdgeInfo

    def execute(
        self, method: str, inputs: dict[str, npt.NDArray[Any]]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Run a static step; return logits [1, rows, vocab] and the new cache."""
        ...


def import_extra(name: str) -> ModuleType:
    """Import a module of the extra; raise ConfigurationError where it is not installed."""
    try:
        logging.disable(logging.WARNING)  # of code for other machines that is not there
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"models for devices need ExecuTorch ({error}); "
            f"install it: {compose_package_install('edge')}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


class EdgeProgram:
    """A .pte file that is open; its steps are computed in this process, with all its rights."""

    def __init__(self, source: Path | bytes, threads: int | None = None) -> None:
        """Load a file or its bytes; raise InvalidModel for a damaged one, or one of another kind.

        ``threads`` is for programs that the process loads from now on, and those before must not be
        run again; by default, all cores.
        """
        if isinstance(source, Path):
            check_file(source)
        self._name = f"'{source}'" if isinstance(source, Path) else "the file"
        if threads is not None:
            pool = import_extra("executorch.extension.pybindings.portable_lib")
            pool._unsafe_reset_threadpool(threads)
        runtime = import_extra("executorch.runtime").Runtime.get()
        try:
            self._program = runtime.load_program(source)
        except RuntimeError as error:
            raise self._fail("cannot be read", error) from None
        if {INFO, TOKENIZER} - self._program.method_names:
            raise InvalidModel(
                f"{self._name} is a program of ExecuTorch, and no model of ours: "
                "make one with splitup-deploy export"
            )
        [text] = self._load(INFO).execute([])
        try:
            self.info = EdgeInfo.read(parse_json(text))
        except (ValueError, InvalidInput) as error:
            raise self._fail("describes no model of this version", error) from None
        if set(self.info.methods) - self._program.method_names:
            raise InvalidModel(f"{self._name} lacks one of its methods; export the model again")
        self._methods = {name: self._load(name) for name in self.info.methods}

    def read_tokenizer(self) -> bytes:
        """Return the tokenizer.json."""
        [tensor] = self._load(TOKENIZER).execute([])
        return bytes(tensor.numpy())

    def _load(self, method: str) -> Any:
        try:
            return self._program.load_method(method)
        except RuntimeError as error:
            raise self._fail("needs an operator that is not there", error) from None

    def _fail(self, what: str, error: Exception) -> InvalidModel:
        problem = str(error).partition("\n")[0]
        return InvalidModel(f"{self._name} {what} ({problem:.160}); export the model again")

    def execute(
        self, method: str, inputs: dict[str, npt.NDArray[Any]]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Run a static step; return logits [1, rows, vocab] and the new cache."""
        torch = import_extra("torch")
        names = self.info.make_shape(method).inputs
        tensors = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in names]
        try:
            logits, cache = self._methods[method].execute(tensors)
        except RuntimeError as error:
            raise self._fail("cannot run a step", error) from None
        return logits.numpy(), cache.numpy()


class EdgeSession:
    """A text's cache, and the steps that are taken on it."""

    def __init__(self, program: StepProgram) -> None:
        self._program, self.info = program, program.info
        self.cache = self.info.make_shape(next(iter(self.info.methods))).new_cache(self.info.dtype)

    def step(self, arrays: Arrays) -> npt.NDArray[np.float32]:
        """Take one step (``splitup.decode.step.make_arrays``); return logits [R, vocab].

        Raises InvalidInput for a step that the model has no room for.
        """
        method = self.info.choose_method(len(arrays["tokens"]))
        shape = self.info.make_shape(method)
        inputs = make_static_inputs(arrays, shape, dtype=self.info.dtype)
        keep_rows(self.cache, arrays["layout"])
        inputs["kv_cache"] = self.cache
        logits, self.cache = self._program.execute(method, inputs)
        wanted: npt.NDArray[np.float32] = logits[0][arrays["outputs"]].astype(np.float32)
        return wanted


def check_file(path: Path) -> None:
    """Raise InvalidModel for a file that is no .pte file, or shorter than its head says.

    ExecuTorch's own reader does not look behind the program, where the weights are.
    """
    try:
        with path.open("rb") as file:
            head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InvalidModel(f"cannot read '{path}': {error.strerror}") from None
    if head[4:6] != b"ET" or head[8:12] != b"eh00" or len(head) < _HEAD_BYTES:
        raise InvalidModel(
            f"'{path}' is no .pte file, or a damaged one: make one with splitup-deploy export"
        )
    program, start, data = np.frombuffer(head, "<u8", 3, 16).tolist()
    wanted = max(program, start + data if data else 0)
    if size < wanted:
        raise InvalidModel(
            f"'{path}' has {size} of {wanted} bytes: it was cut off; copy or export it again"
        )
