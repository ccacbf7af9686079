"""Runs an exported model in a confined process: native code parses and runs what strangers wrote.

    {"file": descriptor}      the open .pte file -> {}, the tokenizer.json and an EdgeInfo as JSON
    {"rows": n} and arrays    one step of the text, as ``splitup.decode.step`` makes it -> float32
                              logits [n, vocab]

The text's cache stays in the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import ConfigurationError, InvalidInput, InvalidModel, describe
from splitup.sandbox.child import Child, ChildDied, ChildFailed, open_files
from splitup.sandbox.confinement import confine
from splitup.sandbox.serving import Answer, serve
from splitup_edge.program import EdgeInfo, EdgeProgram, EdgeSession, check_file, import_extra
from splitup_edge.static_step import Arrays

_MODULE: Final = "splitup_edge.confined_program"
_FLOAT: Final = np.dtype(np.float32)


class EdgeTexts:
    """The parent's side: steps of one text (``splitup.client.text.generation.StepRunner``)."""

    def __init__(self, path: Path) -> None:
        """Start a process that loads a file; raise InvalidModel when it refuses or dies of it."""
        check_file(path)
        self._name = f"'{path}'"
        with open_files([path]) as files:
            bound = tuning.EDGE_FACTOR * os.fstat(files[0]).st_size + tuning.EDGE_BYTES
            self._child = Child(_MODULE, [str(bound)], files=files)
            try:
                _, found = self._child.ask(
                    {"file": files[0]},
                    timeout_s=tuning.EDGE_CALL_S,
                    max_bytes=limits.MAX_TOKENIZER_BYTES + limits.MAX_MANIFEST_BYTES,
                )
                tokenizer, info = found  # ValueError for other numbers of them
                self.tokenizer, self.manifest = (
                    bytes(tokenizer),
                    EdgeInfo.read(parse_json(bytes(info))),
                )
            except BaseException as error:
                self.close()
                if isinstance(error, ChildFailed):
                    raise InvalidModel(f"{self._name}: {describe(error)}") from None
                if isinstance(error, ChildDied):
                    raise self._blame(error) from None
                if isinstance(error, ValueError | InvalidInput):
                    raise InvalidModel(f"{self._name} gave no model: {describe(error)}") from None
                raise

    def submit(self, inputs: Arrays) -> asyncio.Future[dict[str, npt.NDArray[Any]]]:
        """Take one step, behind those before; the future has its logits or what was wrong."""
        return asyncio.ensure_future(self._step(inputs))

    async def _step(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        shape = len(inputs["outputs"]), self.manifest.text.vocab
        kinds = {name: [str(array.dtype), *array.shape] for name, array in inputs.items()}
        size = _FLOAT.itemsize * shape[0] * shape[1]
        try:
            _, found = await self._child.ask_apart(
                {"rows": shape[0], "arrays": kinds},
                [array.tobytes() for array in inputs.values()],
                timeout_s=tuning.EDGE_CALL_S,
                max_bytes=size,
            )
        except ChildFailed as error:
            raise InvalidInput(str(error)) from None
        except ChildDied as error:
            raise self._blame(error) from None
        if [len(data) for data in found] != [size]:
            raise InvalidModel(f"{self._name} gave no logits of {shape[0]} rows")
        return {"logits": np.frombuffer(found[0], _FLOAT).reshape(shape)}

    def _blame(self, error: ChildDied) -> InvalidModel:
        return InvalidModel(f"{self._name} ended its process: {error}; do not trust this file")

    def close(self) -> None:
        """End the process."""
        self._child.close()


class _Text:
    """The child's side."""

    def __init__(self) -> None:
        self._session: EdgeSession

    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        if "file" in question:
            with os.fdopen(question["file"], "rb") as file:
                program = EdgeProgram(file.read())
            self._session = EdgeSession(program)
            return {}, [program.read_tokenizer(), program.info.model_dump_json().encode()]
        kinds = question["arrays"].items()
        arrays = {
            name: np.frombuffer(data, kind).reshape(shape)
            for (name, (kind, *shape)), data in zip(kinds, buffers, strict=True)
        }
        return {}, [self._session.step(arrays).tobytes()]


def main() -> None:
    with contextlib.suppress(ConfigurationError):  # who loads a file is told
        import_extra("executorch.runtime")  # which looks for a folder to write into
        import_extra("torch")
    confine()
    bound = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    serve(_Text().answer)


if __name__ == "__main__":
    main()
