"""A server whose model says what a test tells it to; all else is real, and in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.http_server import ApiServer
from tokenizers import Tokenizer

from splitup.client.leases import LeaseOptions
from splitup.client.text.generation import TextModel
from splitup.client.text.grammar import Grammars
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import Unavailable
from splitup.demo.models import find_example
from splitup.graph.manifest import ChatInfo, Port, TextInfo
from splitup.net.http_server import serve_app

NAME = "scripted"
VOCAB, END, CONTEXT, CHUNK, PRICE = 2_048, 0, 600, 600, 12
FILE = (find_example() / "tokenizer.json").read_bytes()
LIBRARY = Tokenizer.from_str(FILE.decode())
# says whether it is to think, which no other test needs
TEMPLATE = """{%- for tool in tools or [] %}{{- tool.function.name ~ ': <tool_call>\\n{"name": ' }}
{%- endfor %}{%- if enable_thinking is defined %}{{- 'think: ' ~ enable_thinking ~ ' ' ~
reasoning_effort ~ '\\n' }}{%- endif %}
{%- for message in messages %}{{- message.role ~ ': ' }}
{%- if message.reasoning_content %}{{- '(' ~ message.reasoning_content ~ ')' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
{{- '\\n' }}{%- endfor %}"""


class ScriptedModel:
    """A network with one model. Every request's prompt fits in one step."""

    def __init__(self, template: str = TEMPLATE) -> None:
        self._script: Iterator[int] = iter(())
        self.prompts: list[str] = []  # what was fed, as far as it was not cached
        self.steps = 0  # of all sessions
        self.stepped = asyncio.Event()
        self.free_steps: int | None = None  # that are answered at once, None for all
        self.fails: Exception | None = None  # what opening a session ends with
        self.broken: Exception | None = None  # what every step ends with
        self.settled: int | None = None  # steps of the execution, None while it is open
        self._held: deque[tuple[asyncio.Future[Any], np.ndarray]] = deque()
        port = Port(name="tokens", dtype="int32", shape=(CHUNK,), rows="T")
        info = TextInfo(
            tokenizer_digest="0" * 64,
            tokenizer_bytes=len(FILE),
            eos_ids=(END,),
            vocab=VOCAB,
            context=CONTEXT,
            chat=ChatInfo(template=template, bos_token="", eos_token=""),
        )
        self.manifest: Any = SimpleNamespace(
            kind="text-generation",
            is_encoder=False,
            text=info,
            user_inputs=(port,),
            price_nano_usdc=PRICE * 1_000,
            cost_micro_usdc=lambda steps: PRICE * steps,
        )
        tokenizer = ModelTokenizer(FILE, NAME)
        grammars = Grammars(FILE, NAME, VOCAB, [END])
        self.model = TextModel(NAME, self.manifest, info, tokenizer, grammars, CHUNK)

    def say(self, text: str, *, told: int = 0) -> None:
        """Let the next answer be this text after so many tokens of it, and then its end."""
        self._script = iter([*LIBRARY.encode(text, add_special_tokens=False).ids[told:], END])

    def submit(self, session: Any, arrays: Mapping[str, np.ndarray]) -> asyncio.Future[Any]:
        """Take a step of a session."""
        session.steps += 1
        self.steps += 1
        self.stepped.set()
        if len(tokens := arrays["tokens"]) > 1:
            self.prompts.append(LIBRARY.decode([int(token) for token in tokens]))
        row = np.zeros((1, VOCAB), np.float32)
        row[0, next(self._script)] = 100.0
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.broken is not None:
            answer.set_exception(self.broken)
            return answer
        self._held.append((answer, row))
        self._answer()
        return answer

    def release(self, steps: int | None) -> None:
        """Answer so many further steps, None for all."""
        self.free_steps = None if steps is None else (self.free_steps or 0) + steps
        self._answer()

    def lose(self) -> None:
        """Never answer the steps that are held."""
        self._held.clear()

    def break_off(self, error: Exception) -> None:
        """Fail the step that is held, and all that follow."""
        self.broken = error
        self.break_once(error)

    def break_once(self, error: Exception) -> None:
        """Fail the step that is held."""
        self._held.popleft()[0].set_exception(error)

    def _answer(self) -> None:
        while self._held and self.free_steps != 0:
            if self.free_steps is not None:
                self.free_steps -= 1
            answer, row = self._held.popleft()
            if not answer.done():
                answer.set_result({"logits": row})

    async def fetch_text_model(self, _: str) -> TextModel:
        return self.model

    async def fetch_model(self, _: str) -> Any:
        return SimpleNamespace(manifest=self.manifest)

    async def receipt(self, _: str, *, timeout_s: float | None = None) -> Any:
        if self.settled is None:
            raise Unavailable("the execution is open")
        return SimpleNamespace(steps=self.settled, model_id=NAME)

    async def look(self, _: str) -> None:
        """Nodes hold what there is."""

    @asynccontextmanager
    async def session(
        self, _: str, *, steps: int, deadline_s: float, verify: str | None, on_failure: object
    ) -> AsyncIterator[Any]:
        if self.fails is not None:
            raise self.fails
        session = SimpleNamespace(
            plan=SimpleNamespace(request=SimpleNamespace(steps=steps)),
            steps=0,
            failure=None,
            loading=set(),
            execution_id=f"0x{1:064x}",
            manifest=self.manifest,
        )
        session.submit = lambda arrays: self.submit(session, arrays)
        yield session

    def close(self) -> None:
        self.model.tokenizer.close()
        self.model.grammars.close()


@asynccontextmanager
async def serve_script(
    model: ScriptedModel, keys: ApiKeys | None = None, streams: Path | None = None
) -> AsyncIterator[str]:
    """Run the server; give its address. Nothing of what it asked before is cached."""
    timelines: Any = SimpleNamespace(keep=None)
    api = ApiServer(model, LeaseOptions(warm=0), Access(keys), timelines, streams=streams)
    await api.add_model(NAME)
    await api.resume()
    server = await serve_app(api.make_app(), "127.0.0.1", 0, cancels_handlers=True)
    api.settle()
    try:
        yield server.url
    finally:
        await server.close()
        await api.close()
