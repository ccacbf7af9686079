"""A model that writes blocks of tokens, on the market: its bytes, its check, its front doors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.client.text.generation import generate_tokens
from splitup.core.errors import InvalidInput
from splitup.decode.block_diffusion import BlockDiffusionDecoder, DiffusionOptions
from splitup.decode.sampler import Sampler
from splitup.devnet.processes import find_program
from tests.deploy.blocks import SDAR, save_blocks
from tests.deploy.steps import run_step
from tests.e2e.conftest import CHUNK, EXAMPLE, MODEL, Network
from tests.e2e.server import run_server

pytestmark = pytest.mark.long  # in small: decode/test_block_diffusion, client/text/test_block_model

BLOCKS, LAYERS, TOKENS = "blocks", 4, 18
PROMPT = "library for"
MANY_TRIES = 8  # of seven tasks: three plans of four name four different nodes of five


@pytest.fixture(scope="module")
def blocks(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Register random weights with the example's tokenizer, whose token 1 is a mask."""
    folder = tmp_path_factory.mktemp("blocks")
    config: dict[str, Any] = {
        **SDAR,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "max_window_layers": LAYERS,
        "max_position_embeddings": 64,
        "vocab_size": 2048,
        "mask_token_id": 1,
        "eos_token_id": 0,
    }
    save_blocks(folder, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EXAMPLE / name, folder)
    network.register_model(folder, BLOCKS, "--target-vram", "0.3MB")
    network.wait_for_holders(
        network.nodes - len(network.down), BLOCKS
    )  # so that plans name many of them
    return folder


def write_alone(folder: Path, decoder: BlockDiffusionDecoder) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens and the logits of every step of the uncut model."""
    program = load_reference(str(folder), Sizes(chunk=CHUNK))
    state, tokens, steps = program.new_state(), list[int](), list[np.ndarray]()
    while not decoder.finished:
        step = decoder.next_step()
        assert step is not None
        steps.append(run_step(program, state, step))
        tokens += decoder.receive_logits(len(steps) - 1, steps[-1])
    return tokens, steps


async def write_on_nodes(
    net: SplitUp, options: dict[str, Any]
) -> tuple[list[int], list[np.ndarray], Session]:
    """Return the same of the model on nodes, and the session."""
    steps: list[np.ndarray] = []
    decoder, tokenizer = await net.make_decoder(BLOCKS, PROMPT, **options)
    async with net.session(BLOCKS, steps=decoder.max_steps) as session:
        found = generate_tokens(
            session, decoder, tokenizer, on_step=lambda _, logits: steps.append(logits)
        )
        return [token.id async for token in found], steps, session


async def test_blocks_over_several_nodes_are_the_uncut_model_s_and_verified(
    network: Network, blocks: Path
) -> None:
    options: dict[str, Any] = {
        "max_tokens": TOKENS,
        "sampler": Sampler(0.7, 5),
        "diffusion": DiffusionOptions(threshold=0.1),
    }
    async with SplitUp.connect(network.config) as net:
        decoder, _ = await net.make_decoder(BLOCKS, PROMPT, **options)
        assert isinstance(decoder, BlockDiffusionDecoder)
        wanted, expected = write_alone(blocks, decoder)
        counts = []
        for _ in range(MANY_TRIES):
            tokens, steps, session = await write_on_nodes(net, options)
            assert tokens == wanted and len(steps) == len(expected) < TOKENS
            assert [a.tobytes() for a in steps] == [b.tobytes() for b in expected]
            counts.append(len(set(session.plan.executors())))
            if counts[-1] >= 3:  # some may have their stakes bound by executions of other tests
                break
        else:
            raise AssertionError(f"no plan named three nodes: {counts}")
        receipt = await net.receipt(session.execution_id)
        evidence = await net.evidence(receipt)
    # every task is drawn here: validators computed all of its steps again, to equal bytes
    assert receipt.status == "settled" and receipt.steps == len(steps) and not receipt.slashes
    assert [entry.task for entry in evidence.verdicts] == list(range(len(session.manifest.tasks)))
    assert {entry.outcome for entry in evidence.verdicts} == {"honest"}


async def test_a_model_is_not_decoded_by_the_other_kind(network: Network, blocks: Path) -> None:
    async with SplitUp.connect(network.config) as net:
        options: dict[str, Any] = {"max_tokens": 8}
        for name in ("sequential", "lookahead", "speculative"):
            with pytest.raises(InvalidInput, match="writes blocks of tokens"):
                await anext(net.generate(BLOCKS, PROMPT, decoder=name, **options))
        with pytest.raises(InvalidInput, match="trained for blocks"):
            await anext(net.generate(MODEL, PROMPT, decoder="diffusion", **options))
        with pytest.raises(InvalidInput, match="'sequential' writes no blocks"):
            await anext(net.generate(MODEL, PROMPT, diffusion=DiffusionOptions(), **options))
        quick = {**options, "diffusion": DiffusionOptions(iterations=1)}
        few, _ = await net.make_decoder(BLOCKS, PROMPT, sampler=Sampler(), **quick)
        usual, _ = await net.make_decoder(BLOCKS, PROMPT, sampler=Sampler(), **options)
        assert few.max_steps < usual.max_steps
        price = await net.quote(BLOCKS, steps=few.max_steps)
        assert await net.quote_generation(BLOCKS, PROMPT, **quick) == price


def test_the_front_doors_write_the_same_blocks(network: Network, blocks: Path) -> None:
    typed = ["--max-tokens", "10", "--decoder", "diffusion", "--threshold", "0.9", "--json"]
    done = subprocess.run(
        [
            *(find_program("splitup"), "generate", BLOCKS, "--prompt", PROMPT, *typed),
            *("--config", network.directory),
        ],
        capture_output=True,
        check=True,
    )
    wanted = json.loads(done.stdout)
    assert len(wanted["tokens"]) == 10
    with (
        run_server(network, "--lease-steps", "200", model=BLOCKS) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(
            model=BLOCKS, prompt=PROMPT, max_tokens=10, temperature=0
        )
        assert answer.choices[0].text == wanted["text"]
        messages: Any = [{"role": "user", "content": PROMPT}]
        asked: dict[str, Any] = {"model": BLOCKS, "messages": messages, "max_tokens": 6}
        chat = client.chat.completions.create(**asked, temperature=0.5, seed=3)
        again = client.chat.completions.create(**asked, temperature=0.5, seed=3, stream=True)
        parts = [part.choices[0].delta.content or "" for part in again if part.choices]
        assert "".join(parts) == chat.choices[0].message.content
        for change, message in (
            ({"response_format": {"type": "json_object"}}, "no grammar can be followed"),
            ({"logprobs": True}, "'logprobs' are for models"),
            ({"presence_penalty": 0.5}, "penalties"),
            ({"max_tokens": 64}, "the context of model blocks is 64 tokens"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(**asked | change)
