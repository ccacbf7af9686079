"""A session of a model that leaves its first and last tasks to the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitup.client.execution.session import Failure, Session
from splitup.client.outcome import Array
from splitup.client.private.final_states import StateAdapter, adapt_states
from splitup.client.private.private_tasks import Begun, ClientPrograms, Tensors
from splitup.core.errors import SplitUpError
from splitup.core.tensors import array_to_bytes, bytes_to_array, check_inputs
from splitup.graph.manifest import Manifest
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Trace

_Future = asyncio.Future[dict[str, Array]]


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step that the nodes are computing."""

    begun: Begun
    rows: list[int]  # whose outputs are wanted, for an adapter
    network: _Future
    result: _Future


class PrivateSession(Session):
    """A session whose inputs and outputs are the model's own; nodes see only what lies between."""

    def __init__(
        self,
        certificate: PlanCertificate,
        manifest: Manifest,
        *options: Any,
        programs: ClientPrograms,
        adapter: StateAdapter | None = None,
        **others: Any,
    ) -> None:
        """Take what ``Session`` takes; ``adapter``, of this session alone, is closed with it."""
        super().__init__(certificate, manifest, *options, **others)
        self.adapter = adapter
        self._run = programs.new_run()
        self._given_specs = tuple(port.spec for port in manifest.user_inputs)
        self._result_specs = tuple(port.spec for port in manifest.user_outputs)
        self._given: asyncio.Queue[tuple[Tensors, _Future]] = asyncio.Queue()
        self._flying: asyncio.Queue[_Flying] = asyncio.Queue()
        self._results: set[_Future] = set()  # not there yet
        self._submitted = 0

    def open(self) -> None:
        """Connect to every executor and start the client's tasks."""
        super().open()
        self._start(self._begin())
        self._start(self._complete())

    def submit(self, inputs: Mapping[str, Array]) -> _Future:
        """Take one step of the model; like ``Session.submit``."""
        self._check_open(self._submitted)
        tensors = check_inputs(self._given_specs, inputs)
        self._submitted += 1
        result: _Future = asyncio.get_running_loop().create_future()
        self._results.add(result)
        result.add_done_callback(self._on_result)
        self._given.put_nowait((tensors, result))
        return result

    async def finish(self) -> tuple[Trace, ...]:
        """End the execution after the last result; like ``Session.finish``."""
        if self._results:
            await asyncio.wait(list(self._results))
        return await super().finish()

    async def close(self) -> None:
        """Close the session and free the states of the client's tasks."""
        await super().close()
        if self.adapter is not None:
            await self.adapter.close()
        with contextlib.suppress(SplitUpError):  # the process has died
            await self._run.end()

    async def _begin(self) -> None:
        """Run the first tasks of every step and submit their outputs to the nodes."""
        while True:
            tensors, result = await self._given.get()
            try:
                begun = await self._run.begin(tensors)
                sends = zip(self._specs, begun.sends, strict=True)
                network = super().submit({s.name: bytes_to_array(s, data) for s, data in sends})
            except Exception as error:  # tinygrad raises anything
                self._give_up(error)
                continue
            self._flying.put_nowait(_Flying(begun, self._read_rows(tensors), network, result))

    async def _complete(self) -> None:
        """Run the last tasks of every step on the outputs of the nodes."""
        while True:
            step = await self._flying.get()
            try:
                arrays = await step.network
                tensors = [array_to_bytes(spec, arrays[spec.name]) for spec in self._output_specs]
                if self.adapter is not None:
                    spec = self._output_specs[0]
                    tensors = [await adapt_states(self.adapter, spec, tensors[0], step.rows)]
                results = await self._run.complete(step.begun, tensors)
            except Exception as error:
                self._give_up(error)
                continue
            if not step.result.done():
                pairs = zip(self._result_specs, results, strict=True)
                step.result.set_result({s.name: bytes_to_array(s, data) for s, data in pairs})

    def _read_rows(self, tensors: Tensors) -> list[int]:
        """Return the rows of a step whose logits are wanted; none for models without rows."""
        for spec, data in zip(self._given_specs, tensors, strict=True):
            if spec.name == "outputs":
                return [int(row) for row in bytes_to_array(spec, data)]
        return []

    def _give_up(self, error: Exception) -> None:
        text = str(error) if isinstance(error, SplitUpError) else f"{type(error).__name__}: {error}"
        self._fail(Failure(f"what runs on the client failed: {text}"))

    def _fail(self, failure: Failure) -> None:
        super()._fail(failure)
        for result in list(self._results):
            if not result.done():
                result.set_exception(self._error())

    def _on_result(self, result: _Future) -> None:
        self._results.discard(result)
        if not result.cancelled():
            result.exception()  # the session raises it again
