"""Embeddings and reranking on a real network, asked by the official client of OpenAI."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from tokenizers import Tokenizer

from splitup.client.connection import SplitUp
from splitup.core.errors import InvalidInput
from splitup.decode.texts import EncodedText, make_text_arrays
from splitup.devnet.processes import find_program
from tests.deploy.encoders import CASES, save_encoder
from tests.e2e.conftest import MODEL, Network
from tests.e2e.server import run_keys, run_server

pytestmark = pytest.mark.long  # in small: serve/apis/test_encoding.py, test_dialects.py

CHUNK = 40
EMBEDDER, RANKER = "tiny-bert", "tiny-ranker"
TEXTS = ["w4 w5 w6", "w7", "w39 w4 " * 12, "w8 w9"]
QUERY, DOCUMENTS = "w4 w9", ["w5 w6 w7", "w11", "w4 w9 w10 w30"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both models."""
    folder = tmp_path_factory.mktemp("encoders")
    save_encoder(folder / EMBEDDER, CASES["bert"])
    save_encoder(folder / RANKER, CASES["bert-ranker"])
    return folder


@pytest.fixture(scope="module")
def url(network: Network, folder: Path, database: str, key: str) -> Iterator[str]:
    for name in (EMBEDDER, RANKER):
        options = ("--target-vram", "100MB", "--chunk", str(CHUNK))
        network.register_model(folder / name, name, *options)
    for name in (EMBEDDER, RANKER):
        network.wait_for_holders(3, name)
    with run_server(network, EMBEDDER, RANKER, "--lease-steps", "60", "--keys", database) as url:
        yield url


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('keys') / 'keys.sqlite'}"


@pytest.fixture(scope="module")
def key(database: str) -> str:
    return str(run_keys(database, "new", "ann", "--budget", "0.01")["key"])


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    return compute(folder / EMBEDDER, [(text,) for text in TEXTS])


def compute(source: Path, texts: list[tuple[str, ...]]) -> np.ndarray:
    """Return what the whole model says of texts or pairs, each alone, in this process."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    program, rows = load_reference(str(source), Sizes(chunk=CHUNK)), []
    for text in texts:
        found = tokenizer.encode(*text)
        arrays = make_text_arrays([EncodedText(tuple(found.ids), tuple(found.type_ids))])
        inputs = [arrays[spec.name].tobytes() for spec in program.inputs]
        rows.append(np.frombuffer(program.run(program.new_state(), inputs)[0], np.float32))
    return np.stack(rows)


def test_vectors_are_those_of_the_model(
    url: str, network: Network, vectors: np.ndarray, database: str, key: str
) -> None:
    wanted = vectors
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.embeddings.create(model=EMBEDDER, input=TEXTS)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        raw = client.embeddings.with_raw_response.create(model=EMBEDDER, input=TEXTS)
        answer = raw.parse()
        plain = client.embeddings.create(
            model=EMBEDDER, input=TEXTS, encoding_format="float", dimensions=32
        )
        tokens = client.embeddings.create(model=EMBEDDER, input=[[2, 4, 5, 6, 3], [2, 7, 3]])
        one = client.embeddings.create(model=EMBEDDER, input=[2, 7, 3])
    for found, rows in (
        (answer, wanted),
        (plain, wanted),
        (tokens, wanted[:2]),
        (one, wanted[1:2]),
    ):
        given = np.array([entry.embedding for entry in found.data], np.float32)
        assert given.tobytes() == rows.tobytes()
        assert [entry.index for entry in found.data] == list(range(len(rows)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5 + 3 + 26 + 4
    cost = answer.usage.model_extra["splitup"]  # type: ignore[index]
    assert cost["steps"] == 1, "texts that fit share a step"
    assert raw.headers["x-splitup-cost"] == str(cost["cost_micro_usdc"]) != "0"
    assert [raw.headers["x-splitup-execution"]] == cost["executions"]
    [spent] = [entry["spent_micro_usdc"] for entry in run_keys(database, "list")["keys"]]
    assert spent == 4 * cost["cost_micro_usdc"]
    with SplitUp.connect_sync(network.config) as net:
        made = net.embed(EMBEDDER, TEXTS)
        assert made.vectors.tobytes() == wanted.tobytes() and made.tokens == 38
        assert net.receipt(made.execution_id).status == "settled"
        with pytest.raises(InvalidInput, match="gives embeddings and writes no text"):
            next(net.generate(EMBEDDER, "w4"))
        for model in (MODEL, RANKER):
            with pytest.raises(InvalidInput, match="no embeddings"):
                net.embed(model, TEXTS)
        for texts in ([], "w4"):
            with pytest.raises(InvalidInput, match="list of texts"):
                net.embed(EMBEDDER, texts)
        for text in ("", [], [40], "w4 " * 31):
            with pytest.raises(InvalidInput, match="text 1: "):
                net.embed(EMBEDDER, ["w4", text])


def test_the_command_prints_lines_of_json(url: str, network: Network, vectors: np.ndarray) -> None:
    inputs = ["--input", TEXTS[0], "--input", "-"]
    done = subprocess.run(
        [find_program("splitup"), "embed", EMBEDDER, *inputs, "--config", network.config],
        input=TEXTS[1] + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["index"] for row in rows] == [0, 1] and "cost" in done.stderr
    assert (
        np.array([row["embedding"] for row in rows], np.float32).tobytes() == vectors[:2].tobytes()
    )


async def post(
    url: str, path: str, body: object, key: str, **headers: str
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", **headers}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{url}/{path}", json=body, headers=headers) as reply:
            return reply.status, await reply.json()


async def test_documents_are_ranked(url: str, folder: Path, key: str) -> None:
    wanted = compute(folder / RANKER, [(QUERY, text) for text in DOCUMENTS])[:, 0]
    body = {"model": RANKER, "query": QUERY, "documents": DOCUMENTS}
    status, answer = await post(url, "rerank", {**body, "return_documents": True}, key)
    assert status == 200 and answer["model"] == RANKER
    order = sorted(range(3), key=lambda index: -wanted[index])
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        score = 1 / (1 + np.exp(-float(wanted[result["index"]])))
        assert result["relevance_score"] == pytest.approx(score, abs=1e-6)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    documents = [{"text": text} for text in DOCUMENTS]
    _, best = await post(url, "rerank", {**body, "documents": documents, "top_n": 1}, key)
    assert [result["index"] for result in best["results"]] == order[:1]
    assert best["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    status, quote = await post(url, "quote", body, key)
    assert status == 200 and quote["max_cost_micro_usdc"] > 0
    headers = {"x-splitup-quote": quote["id"]}
    status, again = await post(url, "rerank", body, key, **headers)
    assert status == 200 and again["usage"]["splitup"]["steps"] <= quote["max_steps"]
    status, error = await post(url, "rerank", {**body, "documents": DOCUMENTS * 20}, key, **headers)
    assert status == 400 and error["error"]["code"] == "max_cost_exceeded"


@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [
        ("embeddings", {"model": "unknown"}, 404, "model"),
        ("embeddings", {"model": MODEL}, 400, "model"),
        ("embeddings", {"model": RANKER}, 400, "model"),
        ("embeddings", {"input": ""}, 400, "input.0"),
        ("embeddings", {"input": []}, 400, "input"),
        ("embeddings", {"input": ["w4", ""]}, 400, "input.1"),
        ("embeddings", {"input": ["w4"] * 2049}, 400, "input"),
        ("embeddings", {"input": ["w4 " * 31]}, 400, "input.0"),
        ("embeddings", {"input": "w" * 10_000}, 400, "input.0"),
        ("embeddings", {"input": [[4, 40]]}, 400, "input.0"),
        ("embeddings", {"input": [[-1]]}, 400, "input.0"),
        ("embeddings", {"input": {"text": "w4"}}, 400, "input"),
        ("embeddings", {"dimensions": 16}, 400, "dimensions"),
        ("embeddings", {"encoding_format": "int8"}, 400, "encoding_format"),
        ("embeddings", {"stream": True}, 400, "stream"),
        ("rerank", {"model": EMBEDDER}, 400, "model"),
        ("rerank", {"query": ""}, 400, "query"),
        ("rerank", {"documents": []}, 400, "documents"),
        ("rerank", {"documents": ["w4", "w4 " * 30]}, 400, "documents.1"),
        ("rerank", {"top_n": 0}, 400, "top_n"),
        ("chat/completions", {"model": EMBEDDER}, 400, "model"),
        ("completions", {"model": RANKER}, 400, "model"),
    ],
)
async def test_bad_input_is_an_error_of_the_api(
    url: str, key: str, path: str, change: dict[str, Any], status: int, param: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "embeddings": {"model": EMBEDDER, "input": "w4"},
        "rerank": {"model": RANKER, "query": QUERY, "documents": DOCUMENTS},
        "chat/completions": {"messages": [{"role": "user", "content": "w4"}]},
        "completions": {"prompt": "w4"},
    }
    given, body = await post(url, path, {**bodies[path], **change}, key)
    error = body["error"]
    assert (given, error["param"]) == (status, param) and len(error["message"]) <= 200
    is_long = "32 tokens" in error["message"]
    assert (error["code"] == "context_length_exceeded") == is_long
