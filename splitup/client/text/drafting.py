"""A draft model: a registered text model that this machine computes by itself.

Its developer is a stranger, so a confined process computes, as for the client's tasks of a private
model (``splitup.client.private.private_tasks``). Wrong drafts cost time, never a wrong token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from splitup.client.private.private_tasks import ClientPrograms
from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, InvalidModel, SplitUpError
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.speculation.block_drafts import BlockDrafts
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.ngrams import InstantDrafts, NgramDrafts
from splitup.decode.speculation.sources import DraftSource, ModelDrafts
from splitup.decode.speculation.target_ngrams import TargetNgrams
from splitup.decode.step import Decoder, StepInput, make_arrays
from splitup.graph.manifest import (
    ClientInput,
    ClientPart,
    ClientTask,
    DiffusionInfo,
    Manifest,
    TextInfo,
)

_CLOSE_S: Final = 1.0

_log = logging.getLogger("splitup.client.text.drafting")


def bring_home(manifest: Manifest, model: str) -> Manifest:
    """Return a model's manifest with every task left to the client.

    Raises InvalidInput for a model that leaves some of its tasks to the client already.
    """
    if manifest.client is not None:
        raise InvalidInput(f"model {model} is a private one; name a draft model that is not")
    tasks = tuple(
        ClientTask(
            **{name: getattr(task, name) for name in ClientTask.model_fields if name != "inputs"},
            inputs=tuple(ClientInput(**dict(port)) for port in task.inputs),
        )
        for task in manifest.tasks
    )
    part = ClientPart(inputs=manifest.inputs, outputs=manifest.outputs, tasks=tasks, sends=())
    return manifest.model_copy(update={"client": part})


def check_vocabulary(target: bytes, draft: bytes, model: str) -> None:
    """Raise InvalidInput unless two tokenizer.json, of strangers, have the same tokens."""
    ours, theirs = map(_read_vocabulary, (target, draft))
    if ours is None or ours != theirs:
        raise InvalidInput(
            f"the draft model {model} has another vocabulary than the model itself, so its tokens "
            "mean other text; name one that was trained with the same tokenizer"
        )


def _read_vocabulary(data: bytes) -> dict[str, Any] | list[Any] | None:
    """Return a vocabulary in the library's own form; None where there is none."""
    try:
        file = parse_json(data, max_values=len(data), max_growth=limits.DENSE_GROWTH)
        found = file["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict | list) else None


def make_blocks(info: DiffusionInfo | None) -> Blocks | None:
    """Return a manifest's blocks as decoders take them; None for one token after the other."""
    return None if info is None else Blocks(info.block_size, info.mask_id, info.are_shifted)


class DraftModel(Protocol):
    """A model that drafts one text, here or elsewhere."""

    def make_source(self, request: TextRequest, experience: Experience) -> DraftSource:
        """Return the source of drafts whose questions it answers."""
        ...

    async def compute(self, question: Any) -> Any:
        """Return the answer to the source's question. Raises SplitUpError."""
        ...

    async def end(self) -> None:
        """Free what it holds."""
        ...


class LocalModel:
    """One text's run of a model whose tasks are all the client's.

    Raises InvalidInput for a model with other inputs or outputs than a text model's.
    """

    def __init__(
        self, name: str, manifest: Manifest, info: TextInfo, programs: ClientPrograms
    ) -> None:
        self.name = name
        self.info = info
        self.context = info.context
        self._manifest = manifest
        self._programs = programs
        self._run = programs.new_run()
        inputs = {port.name: port.spec for port in manifest.user_inputs}
        outputs = {port.name: port.spec for port in manifest.user_outputs}
        if set(inputs) != {"tokens", "outputs", "layout"} or set(outputs) != {"logits"}:
            raise InvalidInput(f"model {name} does not take steps of a text; name another draft")
        self._inputs, self._output = list(inputs.values()), outputs["logits"]
        self.chunk = inputs["tokens"].shape[0]

    def open_text(self) -> LocalModel:
        """Return the same model for another text."""
        return LocalModel(self.name, self._manifest, self.info, self._programs)

    async def compute(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the logits of a step, float32 [R, vocab]. Raises SplitUpError."""
        arrays = make_arrays(step, self.chunk)
        tensors = [array_to_bytes(spec, arrays[spec.name]) for spec in self._inputs]
        [data] = await self._run.complete(await self._run.begin(tensors), ())
        if len(data) != len(step.outputs) * self._output.row_bytes:
            raise InvalidModel(f"it gave {len(data)} bytes for {len(step.outputs)} rows of logits")
        return bytes_to_array(self._output, data)

    def make_source(self, request: TextRequest, experience: Experience) -> DraftSource:
        """Return what drafts a text with it. Raises InvalidInput for too small steps."""
        rates = experience.model
        if (blocks := make_blocks(self.info.diffusion)) is None:
            return ModelDrafts(request, rates, chunk=self.chunk, context=self.context)
        return BlockDrafts(request, rates, chunk=self.chunk, context=self.context, blocks=blocks)

    async def end(self) -> None:
        """Free the states."""
        await self._run.end()


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a speculative decoder drafts with: n-grams, and a model if there is one."""

    draft: DraftModel | None = None
    experience: Experience = field(default_factory=Experience)

    def make_decoder(self, request: TextRequest) -> SpeculativeDecoder:
        """Return the decoder."""
        known = self.experience
        sources: list[DraftSource | InstantDrafts] = [
            NgramDrafts(request, known.ngrams),
            TargetNgrams(request, known.target_ngrams),
        ]
        if self.draft is not None:
            sources.append(self.draft.make_source(request, known))
        return SpeculativeDecoder(request, sources, known)

    def start(self, decoder: Decoder) -> Drafting | None:
        """Return what computes a decoder's drafts; None without a draft model, or for another."""
        if self.draft is None or not isinstance(decoder, SpeculativeDecoder):
            return None
        return Drafting(decoder, self.draft)


class Drafting:
    """Computes a decoder's drafts while steps of the target are on their way."""

    def __init__(self, decoder: SpeculativeDecoder, model: DraftModel) -> None:
        self._decoder = decoder
        self._model = model
        self._task: asyncio.Task[Any] | None = None

    async def advance(self, result: asyncio.Future[Any] | None) -> bool:
        """Wait for ``result`` or a draft; return whether the decoder may have a step before it.

        Without a ``result`` to wait for, the decoder is asked again while a draft is late. When the
        draft model fails, the text goes on without it.
        """
        if self._task is None and (step := self._decoder.next_draft()) is not None:
            self._task = asyncio.create_task(self._model.compute(step))
        if self._task is None:
            return False
        awaited = [self._task, *([] if result is None else [result])]
        patience_s = self._decoder.patience_s if result is None else None
        await asyncio.wait(awaited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._task.done():
            return result is None
        task, self._task = self._task, None
        try:
            self._decoder.receive_draft(task.result())
        except SplitUpError as error:
            _log.warning("the draft model failed, and the text goes on without it: %s", error)
            self._decoder.receive_draft(None)
        return True

    async def close(self) -> None:
        """Stop drafting, and free what the model holds for this text."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(SplitUpError, TimeoutError):  # its process has died, or hangs
            async with asyncio.timeout(_CLOSE_S):
                await self._model.end()
