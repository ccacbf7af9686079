"""A device's side of split inference: text, tokens and sampling here, the layers on nodes.

The device needs neither an account nor a chain: a server (``splitup serve --private``) pays. It
fetches the model's files from that server and checks them by their digests, down from the model id.
Requests carry hidden states; ``splitup_private.split.messages`` has their form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

import numpy as np

from splitup.client import defaults
from splitup.client.outcome import Array
from splitup.client.private.private_tasks import Begun, ClientPrograms, ClientRun
from splitup.client.text.generation import Token, encode_prompt, generate_tokens, get_text_info
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.config import find_cache_directory
from splitup.core import limits
from splitup.core.background import Closing
from splitup.core.codec import compute_digest
from splitup.core.errors import (
    InvalidInput,
    InvalidModel,
    PeerFault,
    SplitUpError,
    Unavailable,
    describe,
)
from splitup.core.tensors import array_to_bytes, bytes_to_array, check_inputs
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import (
    Manifest,
    TextInfo,
    get_blob_key,
    get_task_key,
    get_weights_key,
)
from splitup.graph.manifest_rules import load_manifest
from splitup.messages.storage import Grant, Grants
from splitup.storage.task_cache import TaskCache
from splitup_private.split import messages as split
from splitup_private.split.connection import SplitServerConnection, SplitTransport
from splitup_private.split.cut import Cut
from splitup_private.split.messages import Forward, Forwarded, PrivateModel, SplitError
from splitup_private.split.noise import Noise, RowNoise

ATTEMPTS: Final = 3  # a session that the server forgot is fed again from position 0
END_S: Final = 5.0
_LOST: Final = {"session_evicted", "session_unknown", "execution_failed"}


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A private model on this device: its tokenizer, and the client's tasks, compiled.

    But for ``name``, by which its server knows it, all of it follows from the model's id.
    """

    name: str
    manifest: Manifest
    text: TextInfo
    cut: Cut
    tokenizer: ModelTokenizer
    programs: ClientPrograms

    @property
    def sent(self) -> int:
        """The place of the hidden states among the nodes' inputs."""
        names = [port.name for port in self.manifest.inputs]
        return names.index(self.cut.hidden)


class SplitClient(Closing):
    """A device. Use ``async with SplitClient(url) as device``; one event loop at a time.

    ``url`` is the server's, ``api_key`` one of its keys if it has any.
    """

    def __init__(self, url: str, *, api_key: str = "", cache: Path | None = None) -> None:
        self._server = SplitServerConnection(url, api_key)
        self._cache = cache or find_cache_directory()
        self._models: dict[str, DeviceModel] = {}

    async def __aenter__(self) -> Self:
        self._server.open()
        return self

    async def close(self) -> None:
        """Close the models and the connection."""
        for model in self._models.values():
            model.programs.close()
            model.tokenizer.close()
        await self._server.close()

    async def list_models(self) -> list[PrivateModel]:
        """Return the models that the server offers. Raises SplitError, Unavailable."""
        return list(await self._server.fetch_models())

    async def open(self, model: str) -> DeviceModel:
        """Return a model, by name or id; fetch and compile what is missing.

        Raises InvalidInput for an unknown model, InvalidModel for files that are not the model's.
        """
        if model not in self._models:
            key = "model_id" if model.startswith("0x") else "name"  # no name passes for an id
            found = [one for one in await self.list_models() if getattr(one, key) == model]
            if not found:
                raise InvalidInput(f"{self._server.url} offers no private model '{model}'")
            self._models[model] = await self._load(found[0].name, found[0].model_id)
        return self._models[model]

    async def _load(self, name: str, model_id: str) -> DeviceModel:
        cache = TaskCache(self._cache, _ServerFiles(self._server), self._server.http, _trust)
        manifest = await cache.fetch_manifest(model_id)
        text, cut, part = get_text_info(manifest, name), Cut.find(manifest, name), manifest.client
        assert part is not None  # or there is no cut
        if text.diffusion is not None:
            raise InvalidModel(
                f"model {name} writes blocks of tokens, and devices feed one after the other"
            )
        files = [await cache.fetch_program(model_id, task) for task in part.tasks]
        path = await cache.fetch_tokenizer(model_id, text)
        data = await asyncio.to_thread(path.read_bytes)
        tokenizer = await asyncio.to_thread(ModelTokenizer, data, f"model {name}")
        try:
            programs = await ClientPrograms.load(manifest, files)
        except BaseException:
            tokenizer.close()
            raise
        return DeviceModel(name, manifest, text, cut, tokenizer, programs)

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = defaults.MAX_TOKENS,
        sampler: Sampler | None = None,
        noise: Noise | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Yield the tokens that continue a prompt: the same as ``Network.generate``.

        ``noise`` is added to all that is sent; the tokens are then other ones. Raises InvalidInput,
        SplitError and Unavailable.
        """
        found = await self.open(model)
        info = found.text
        tokens = await found.tokenizer.run(partial(encode_prompt, found.tokenizer, prompt))
        request = TextRequest(
            prompt=tuple(tokens),
            sampler=sampler or Sampler(),
            max_tokens=max_tokens,
            eos_ids=frozenset(info.eos_ids),
            vocab=info.vocab,
            context=info.context,
            chunk=found.cut.chunk,
        )
        most_rows = min(len(tokens) + max_tokens - 1, info.context)
        async with self.session(model, noise=noise, most_rows=most_rows) as session:
            async for token in generate_tokens(
                session, SequentialDecoder(request), found.tokenizer
            ):
                yield token

    @contextlib.asynccontextmanager
    async def session(
        self, model: str, *, noise: Noise | None = None, most_rows: int | None = None
    ) -> AsyncGenerator[ClientSession, None]:
        """Open a session, which takes steps like one of a network; only causal ones.

        ``noise`` is for ``most_rows`` rows, by default as many as the model has positions.
        """
        found = await self.open(model)
        added = None
        if noise is not None:
            added = RowNoise(noise, most_rows or found.text.context, await measure_length(found))
        transport = SplitTransport(self._server)
        session = ClientSession(found, transport, added)
        try:
            yield session
        finally:
            await session.close()
            await transport.close()


@dataclass(frozen=True, slots=True)
class _Step:
    tensors: Sequence[bytes]
    rows: int
    result: asyncio.Future[dict[str, Array]]


class ClientSession:
    """A text under way. Steps that wait are sent together; rows that were sent are kept here.

    So the whole session can be fed again when the server has forgotten it.
    """

    def __init__(
        self, model: DeviceModel, transport: SplitTransport, noise: RowNoise | None = None
    ) -> None:
        self.manifest = model.manifest
        self.noise = noise
        self.answers: list[Forwarded] = []
        self._model = model
        self._transport = transport
        self._run: ClientRun = model.programs.new_run()
        self._given = tuple(port.spec for port in self.manifest.user_inputs)
        self._results = tuple(port.spec for port in self.manifest.user_outputs)
        self._sent = model.sent
        self._fed: list[Array] = []  # rows that the nodes hold
        self._rows = 0  # of all steps that were submitted
        self._id: str | None = None
        self._queue: asyncio.Queue[_Step] = asyncio.Queue()
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._work())

    def submit(self, inputs: Mapping[str, Array]) -> asyncio.Future[dict[str, Array]]:
        """Take one step of the model; the future gives its outputs by name."""
        if self._error is not None:
            raise self._error
        layout = inputs["layout"]
        count = len(layout)
        wanted = np.arange(self._rows, self._rows + count)
        causal = np.tril(np.broadcast_to(np.arange(1, count + 1), (count, count)))
        if (
            layout[0, 1] != self._rows
            or not np.array_equal(layout[:, 0], wanted)
            or not np.array_equal(layout[:, 2 : 2 + count], causal)
        ):
            raise InvalidInput(
                f"split inference feeds a text in order, and position {self._rows} is next; "
                "decode sequentially"
            )
        tensors = check_inputs(self._given, inputs)
        self._rows += count
        result: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Step(tensors, count, result))
        return result

    async def close(self) -> None:
        """End the session at the server and free its states here."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(SplitUpError, TimeoutError):
            if self._id is not None:
                end = split.EndSession(type="end", session_id=self._id)
                async with asyncio.timeout(END_S):
                    await self._transport.ask(end, b"", split.Ended)
        with contextlib.suppress(SplitUpError):  # the process has died
            await self._run.end()

    async def _work(self) -> None:
        while True:
            steps = [await self._queue.get()]
            try:
                while not self._queue.empty():
                    steps.append(self._queue.get_nowait())
                await self._compute(steps)
            except Exception as error:  # tinygrad raises anything
                ours = error if isinstance(error, SplitUpError) else None
                self._error = ours or SplitUpError(describe(error))
                for step in steps:
                    if not step.result.done():
                        step.result.set_exception(self._error)

    async def _compute(self, steps: Sequence[_Step]) -> None:
        width = self._model.cut.width
        begun: list[Begun] = [await self._run.begin(step.tensors) for step in steps]
        parts = [np.frombuffer(one.sends[self._sent], "<f4").reshape(-1, width) for one in begun]
        rows = np.concatenate(parts)
        computed = await self._forward(rows if self.noise is None else self.noise.add(rows))
        place = 0
        for step, started in zip(steps, begun, strict=True):
            part = computed[place : place + step.rows]
            place += step.rows
            [spec] = [port.spec for port in self.manifest.outputs]
            results = await self._run.complete(started, [array_to_bytes(spec, part)])
            pairs = zip(self._results, results, strict=True)
            if not step.result.done():
                step.result.set_result({s.name: bytes_to_array(s, data) for s, data in pairs})

    async def _forward(self, rows: Array) -> Array:
        """Return what the nodes make of the next rows."""
        self._fed.append(rows)
        for attempt in range(1, ATTEMPTS + 1):
            is_again = attempt > 1 or self._id is None
            feed = np.concatenate(self._fed) if is_again else rows
            start = sum(map(len, self._fed)) - len(feed)
            try:
                return (await self._send(feed, start))[-len(rows) :]
            except (SplitError, Unavailable) as error:
                is_lost = isinstance(error, Unavailable) or error.code in _LOST
                if not is_lost or attempt == ATTEMPTS:
                    raise
                self._id = None
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, rows: Array, position: int) -> Array:
        cut, parts = self._model.cut, []
        for first in range(0, len(rows), cut.max_rows):
            part = np.ascontiguousarray(rows[first : first + cut.max_rows], "<f4")
            request = Forward(
                type="forward",
                model=self._model.name,
                seq_len=len(part),
                hidden_dim=cut.width,
                session_id=self._id,
                incremental=position + first > 0,
                position=position + first,
            )
            answer, data = await self._transport.ask(request, part.tobytes(), Forwarded)
            if len(data) != part.nbytes or answer.cached_seq_len != position + first + len(part):
                raise SplitError("bad_message", "the server answered other rows than it was sent")
            self._id = answer.session_id
            self.answers.append(answer)
            parts.append(np.frombuffer(data, "<f4").reshape(part.shape))
        return np.concatenate(parts)


async def measure_length(model: DeviceModel) -> float:
    """Return the median length of a model's hidden states, for tokens that no text chooses."""
    chunk = model.cut.chunk
    tokens = np.linspace(0, model.text.vocab - 1, chunk).astype(int).tolist()
    arrays = make_arrays(make_causal_step(tokens, 0), chunk)
    specs = [port.spec for port in model.manifest.user_inputs]
    run = model.programs.new_run()
    try:
        begun = await run.begin(check_inputs(specs, arrays))
    finally:
        await run.end()
    rows = np.frombuffer(begun.sends[model.sent], "<f4").reshape(-1, model.cut.width)
    return float(np.median(np.linalg.norm(rows.astype(np.float64), axis=1)))


class _ServerFiles:
    """The server's files as an object store; the cache checks every digest."""

    def __init__(self, server: SplitServerConnection) -> None:
        self._server = server

    async def fetch_manifest(self, model_id: str) -> bytes:
        """Return a model's manifest, after checking that its SHA-256 is the model's id."""
        data = await self._server.fetch_file(model_id[2:], max_bytes=limits.MAX_MANIFEST_BYTES)
        if compute_digest(data) != model_id[2:]:
            url = self._server.url
            raise PeerFault(f"{url} sent a manifest that is not {model_id}", peer=url)
        return data

    async def model_grants(self, model_id: str) -> Grants:
        """Return where the files are that the model's manifest leaves to the client."""
        manifest = load_manifest(await self.fetch_manifest(model_id))
        files: dict[str, str] = {}
        if manifest.text is not None:
            files[get_blob_key(manifest.text.tokenizer_digest)] = manifest.text.tokenizer_digest
        for task in () if manifest.client is None else manifest.client.tasks:
            files[get_task_key(task.task_id)] = task.task_id
            if task.weights_digest:
                files[get_weights_key(task.weights_digest)] = task.weights_digest
        return Grants(grants=tuple(self._grant(key, digest) for key, digest in files.items()))

    def _grant(self, key: str, digest: str) -> Grant:
        return Grant(
            method="GET",
            key=key,
            url=self._server.get_file_url(digest),
            headers=self._server.headers,
            length_bytes=None,
            expires_at_s=2**53 - 1,
        )


async def _trust(_: Manifest) -> None:
    """Accept a manifest whose SHA-256 is the model's id: this device reads no chain."""
