"""What agents do to the OpenAI API: conversations that grow, and clients that give up and retry."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp
import openai

from bench.modes.serve import ask_stream, open_http
from bench.report import Bar, Report, say
from bench.testbed.network import run_example
from bench.testbed.programs import run_server
from splitup.demo.models import MODEL
from splitup.demo.run import EXAMPLE, NODES
from splitup.devnet.ports import find_free_ports

CONTEXT: Final = 2_304  # of the example, for which its tasks still fit
NODE_VRAM_BYTES: Final = 200_000_000  # for the caches of eight leases at once
TURNS: Final = 10
TURN_CHARS: Final = 1_000  # that a user adds; with the answers ten turns have some 2,000 tokens
ANSWER_TOKENS: Final = 24
CLIENTS: Final = 30
PATIENCE_S: Final = 4.0
RETRIES: Final = 2
TOKENS: Final = 30
_WORDS: Final = ("library", "tool", "python", "server", "font", "game", "network", "editor")
_LEASES: Final = ("--lease-steps", "8192")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: how long its first token took, and how much was fed for it."""

    prompt: int
    fed: int
    steps: int
    first_s: float


async def take_turn(http: aiohttp.ClientSession, url: str, said: str) -> tuple[Turn, str]:
    """Ask for the next answer; return it with what it took."""
    bias = {"0": -100}  # the token that ends a text
    asked = {"prompt": said, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logit_bias": bias}
    answer = await ask_stream(http, url, asked)
    usage = answer["usage"]
    fed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    turn = Turn(usage["prompt_tokens"], fed, usage["splitup"]["steps"], answer["first_s"])
    return turn, answer["text"]


def write_turn(number: int) -> str:
    """Return what a user says: words in another order each time."""
    words = [_WORDS[(number * 7 + at * at) % len(_WORDS)] for at in range(TURN_CHARS)]
    return f"\n{number}: {' '.join(words)}"[:TURN_CHARS] + "\n"


async def converse(config: str) -> dict[str, list[Turn]]:
    """Hold a conversation; then ask the last turn again of a server started anew, twice."""
    turns, said = [], ""
    async with run_server(config, MODEL, *_LEASES) as (url, _), open_http() as http:
        await ask_stream(http, url, {"prompt": "warm", "max_tokens": 2})  # waits for the lease
        for number in range(TURNS):
            said += write_turn(number)
            turn, answer = await take_turn(http, url, said)
            say(f"turn {number + 1}: {turn}")
            turns.append(turn)
            said += answer
        said += write_turn(TURNS)
    async with run_server(config, MODEL, *_LEASES) as (url, _), open_http() as http:
        await ask_stream(http, url, {"prompt": "warm", "max_tokens": 2})
        again = []
        for _ in range(2):
            again.append((await take_turn(http, url, said))[0])
            say(f"after a restart: {again[-1]}")
    return {"turns": turns, "restarted": again}


async def be_impatient(config: str, patience_s: float | None) -> dict[str, Any]:
    """Let 30 of OpenAI's clients ask at once; return what they got, and what was paid."""
    [port] = find_free_ports(1)
    flags = ("--metrics", f"127.0.0.1:{port}")
    async with run_server(config, MODEL, *flags) as (url, _), open_http() as http:
        await ask_stream(http, url, {"prompt": "warm", "max_tokens": 2})
        before = await read_totals(http, port)
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(ask_once(url, number, patience_s) for number in range(CLIENTS))
        )
        seconds = time.perf_counter() - began
        # what nobody waits for ends
        while (after := await read_totals(http, port))["leases_lent"] or after["requests_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    steps = [answer for answer in answers if isinstance(answer, int)]
    paid = (after["cost_usdc_total"] - before["cost_usdc_total"]) * 1e6 / float(EXAMPLE.price)
    return {
        "answered": len(steps),
        "errors": dict(Counter(answer for answer in answers if isinstance(answer, str))),
        "steps_of_answers": sum(steps),
        "steps_paid": round(paid),
        "seconds": round(seconds, 1),
    }


async def ask_once(url: str, number: int, patience_s: float | None) -> int | str:
    """Ask for a text; return its steps, or the name of the error."""
    waits = {} if patience_s is None else {"timeout": patience_s}
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=RETRIES, **waits
    ) as client:
        try:
            answer = await client.completions.create(
                model=MODEL,
                prompt=f"{_WORDS[number % 8]} for {_WORDS[number // 8]}",
                max_tokens=TOKENS,
                temperature=0,
                logit_bias={"0": -100},
            )
        except openai.APIError as error:
            return type(error).__name__
    assert answer.usage is not None
    return int((answer.usage.model_extra or {})["splitup"]["steps"])


async def read_totals(http: aiohttp.ClientSession, port: int) -> dict[str, float]:
    """Return the server's figures by their names."""
    async with http.get(f"http://127.0.0.1:{port}/metrics") as reply:
        found = re.findall(r"^splitup_serve_(\w+)\{[^}]*\} (\S+)$", await reply.text(), re.M)
    return {name: float(value) for name, value in found}


async def run(quick: bool) -> Report:
    """Measure a conversation, and clients with and without a time-out."""
    async with run_example(NODES, NODE_VRAM_BYTES, context=CONTEXT) as (devnet, _):
        config = str(devnet.directory)
        spoken = await converse(config)
        clients = {}
        for name, patience_s in {"patient": None, "impatient": PATIENCE_S}.items():
            clients[name] = await be_impatient(config, patience_s)
            say(f"{CLIENTS} {name} clients: {clients[name]}")
    return make_report(spoken, clients)


def make_report(spoken: dict[str, list[Turn]], clients: dict[str, dict[str, Any]]) -> Report:
    """Return the bars."""
    later, [anew, again] = spoken["turns"][1:], spoken["restarted"]
    most = max(turn.first_s for turn in later)
    impatient = clients["impatient"]
    paid = impatient["steps_paid"] / max(impatient["steps_of_answers"], 1)
    bars = [
        Bar(f"first token of turns 2 to {TURNS}, slowest", round(most, 2), "s", at_most=1.0),
        Bar(f"… of a prompt of {anew.prompt} tokens anew", round(anew.first_s, 2), "s", at_most=10),
        Bar("… of the same prompt once more", round(again.first_s, 2), "s", at_most=1.0),
        Bar(f"of {CLIENTS} clients of {PATIENCE_S:g} s answered", impatient["answered"], "",
            at_least=15),
        Bar("steps paid for those of answers", round(paid, 2), "×", at_most=1.2),
    ]  # fmt: skip
    figures = {name: [asdict(turn) for turn in turns] for name, turns in spoken.items()}
    return Report(bars, {**figures, "clients": clients})
