"""The OpenAI API on a whole network: first tokens, conversations, many chats, idle clients, gas."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import aiohttp

from bench.report import Bar, Report, median_ratio, read_rss_bytes, say, spread
from bench.testbed.network import run_example
from bench.testbed.programs import run_server
from splitup.chain.rpc import Rpc
from splitup.client.connection import SplitUp
from splitup.client.outcome import compute_percentile
from splitup.client.text.generation import generate_tokens
from splitup.decode.sampler import Sampler
from splitup.demo.models import MODEL
from splitup.demo.run import NODES

API: Final = "/v1"
NODE_VRAM_BYTES: Final = 100_000_000  # the caches of CHATS texts are 2.6 MB each
REQUESTS: Final = 100
CHATS: Final = 32
TOKENS: Final = 24  # of every chat
ROUNDS: Final = 3
IDLE: Final = 1_000
TURN_TOKENS: Final = 200
_WORDS: Final = ("library", "tool", "python", "server", "font", "game", "network", "editor")


async def run(quick: bool) -> Report:
    """Measure one server with a warm lease, and one with a lease for each chat."""
    requests, rounds = (20, 1) if quick else (REQUESTS, ROUNDS)
    async with run_example(NODES, NODE_VRAM_BYTES) as (devnet, net):
        serve = partial(run_server, devnet.directory, MODEL)
        async with serve("--lease-steps", "4096") as (url, pid), open_http() as http:
            say("first tokens")
            first = await measure_first_tokens(http, url, requests)
            say("a conversation")
            fed, sampled = [await measure_second_turn(http, url, t) for t in (0.0, 1.0)]
            say("idle connections")
            memory = await measure_idle(url, pid, IDLE // 10 if quick else IDLE)
        say("gas")
        gas = await measure_gas(net, first["execution"], requests)
        chats = []
        for number in range(rounds):
            say(f"{CHATS} chats, round {number + 1}")
            many = ("--leases", str(CHATS), "--warm", str(CHATS), "--lease-steps", "256")
            async with serve(*many) as (url, _), open_http() as http:
                await chat_over_http(http, url)  # waits for the leases
                served = await chat_over_http(http, url)
            chats.append({"serve": served, "sdk": await chat_by_sdk(net)})
    return make_report(first, fed, sampled, memory, gas, chats, requests)


def open_http() -> aiohttp.ClientSession:
    """Return a client without a limit of connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def ask_stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a completion; return the seconds to its first token, its text, usage and execution.

    A stream begins before it is known who computes it, so its usage names the execution.
    """
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body}
    begun, first, text, usage = time.perf_counter(), None, "", {}
    async with http.post(f"{url}{API}/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["text"] and first is None:
                    first = time.perf_counter() - begun
                text += choice["text"]
    execution = usage["splitup"]["executions"][0]
    return {"first_s": first, "text": text, "usage": usage, "execution": execution}


async def measure_first_tokens(
    http: aiohttp.ClientSession, url: str, requests: int
) -> dict[str, Any]:
    """Return the seconds to the first token of requests with different prompts, one at a time."""
    await ask_stream(http, url, {"prompt": "warm", "max_tokens": 2})
    times, executions = [], set()
    for number in range(requests):
        prompt = f"{_WORDS[number % 8]} for {_WORDS[number // 8 % 8]} number {number}"
        answer = await ask_stream(http, url, {"prompt": prompt, "max_tokens": 4, "temperature": 0})
        if answer["first_s"] is not None:  # the model may end a text at once
            times.append(answer["first_s"])
        executions.add(answer["execution"])
    return {"times_s": times, "execution": executions.pop()}


async def measure_second_turn(
    http: aiohttp.ClientSession, url: str, temperature: float
) -> dict[str, int]:
    """Return how many tokens of a long prompt's second turn are fed again.

    A client sends text back. Where a sampled text was made of other tokens than the tokenizer makes
    of it, everything behind them has to be fed again.
    """
    bias = {"0": -100}  # the token that ends a text
    asked = {"prompt": "library", "max_tokens": TURN_TOKENS, "seed": 1, "logit_bias": bias}
    first = await ask_stream(http, url, asked | {"temperature": temperature})
    again = {"prompt": f"library{first['text']} more", "max_tokens": 2}
    usage = (await ask_stream(http, url, again))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "fed": usage["prompt_tokens"] - cached}


async def measure_idle(url: str, pid: int, count: int) -> float:
    """Return by how many MB the server grows over idle connections."""
    port = int(url.rpartition(":")[2])
    before = read_rss_bytes(pid)
    async with AsyncExitStack() as stack:
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
        async with open_http() as http, http.get(f"{url}{API}/models") as reply:
            assert reply.status == 200  # by now it has taken them all
        return (read_rss_bytes(pid) - before) / 1e6


async def measure_gas(net: SplitUp, execution: str, requests: int) -> float:
    """Return the gas of all transactions about an execution, for each of its requests."""
    await net.receipt(execution)
    events = await net.chain.fetch_events("market")
    hashes = {event.transaction for event in events if event.args.get("executionId") == execution}
    gas = 0
    async with Rpc(net.config.rpc_url) as rpc:
        for transaction in hashes:
            receipt = await rpc.request("eth_getTransactionReceipt", transaction)
            gas += int(receipt["gasUsed"], 16)
    return gas / requests


async def chat_over_http(http: aiohttp.ClientSession, url: str) -> float:
    """Return the tokens/s of chats at once over the server."""
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(
            ask_stream(
                http,
                url,
                {"prompt": "library for", "max_tokens": TOKENS, "seed": seed, "temperature": 0.8},
            )
            for seed in range(CHATS)
        )
    )
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return tokens / (time.perf_counter() - begun)


async def chat_by_sdk(net: SplitUp) -> float:
    """Return the tokens/s of as many sessions of the SDK, opened before the time is taken."""
    gate, counts = asyncio.Barrier(CHATS + 1), [0] * CHATS

    async def chat(seed: int) -> None:
        decoder, tokenizer = await net.make_decoder(
            MODEL, "library for", max_tokens=TOKENS, sampler=Sampler(0.8, seed)
        )
        async with net.session(MODEL, steps=decoder.max_steps, deadline_s=120) as session:
            await gate.wait()
            async for _ in generate_tokens(session, decoder, tokenizer):
                counts[seed] += 1
            await gate.wait()

    async with asyncio.TaskGroup() as chats:  # one that fails ends all, who would wait for it
        for seed in range(CHATS):
            chats.create_task(chat(seed))
        await gate.wait()
        begun = time.perf_counter()
        await gate.wait()
        seconds = time.perf_counter() - begun
    return sum(counts) / seconds


def make_report(
    first: dict[str, Any],
    fed: dict[str, int],
    sampled: dict[str, int],
    memory_mb: float,
    gas: float,
    chats: list[dict[str, float]],
    requests: int,
) -> Report:
    """Return the bars."""
    nanoseconds = [int(seconds * 1e9) for seconds in first["times_s"]]
    times = {part: compute_percentile(nanoseconds, part) / 1e6 for part in (50, 99)}
    share = median_ratio([row["serve"] for row in chats], [row["sdk"] for row in chats])
    bars = [
        Bar("first token, warm lease, p50", round(times[50], 1), "ms", at_most=60.0),
        Bar("first token, warm lease, p99", round(times[99], 1), "ms", at_most=200.0),
        Bar(
            f"tokens fed again of a second turn of {fed['prompt']}",
            fed["fed"],
            "tokens",
            at_most=8.0,
        ),
        Bar(f"gas of a request, {requests} on a lease", round(gas), "gas", at_most=8_000.0),
        Bar(f"tokens/s of {CHATS} chats against the SDK", round(share, 2), "×", at_least=0.9),
        Bar("growth over idle connections", round(memory_mb, 1), "MB", at_most=150.0),
    ]
    figures = {
        "requests": requests,
        "second_turn_of_a_sampled_text": sampled,
        "first_token_ms": spread([1000 * seconds for seconds in first["times_s"]]),
        "tokens_per_s": {
            name: round(statistics.median(row[name] for row in chats), 1) for name in chats[0]
        },
    }
    return Report(bars, figures)
