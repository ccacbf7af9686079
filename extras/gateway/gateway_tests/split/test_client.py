"""The Python device against a server: the same tokens, whatever the server forgets."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from gateway_tests.split.local_nodes import CHUNK, NAME, LocalNodes, serve_split
from splitup_deploy.cutting.build import CompiledModel
from splitup_gateway.split.models import SplitModel
from splitup_private.split.client import SplitClient, measure_length
from splitup_private.split.connection import SplitServerConnection
from splitup_private.split.messages import PATH
from splitup_private.split.noise import Noise

from splitup.core.errors import InvalidInput, InvalidModel, SplitUpError
from splitup.decode.sampler import Sampler
from splitup.decode.step import make_arrays, make_tree_step
from splitup.graph.manifest import DiffusionInfo

PROMPT = "a library for parsers of many file formats"
TOKENS = 6


async def generate(device: SplitClient, sampler: Sampler | None = None) -> list[int]:
    found = device.generate(NAME, PROMPT, max_tokens=TOKENS, sampler=sampler)
    return [token.id async for token in found]


async def test_the_tokens_are_the_same_whatever_the_server_forgets(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(0.8, 5)
    async with serve_split(nodes, most=1) as url, SplitClient(url, cache=tmp_path / "c") as device:
        wanted = await generate(device, sampler)
        sent = b"".join(nodes.opened[0].seen)
        tokenizer = (await device.open(NAME)).tokenizer
        ids = np.array(tokenizer.encode(PROMPT) + wanted, np.int32)
        for canary in (PROMPT.encode(), ids[:4].tobytes(), ids[:4].astype("<i8").tobytes()):
            assert canary not in sent and base64.b64encode(canary)[:-4] not in sent
        async with device.session(NAME) as session:
            tree = make_arrays(make_tree_step((7, 8, 9), (-1, 0, 0), 0), CHUNK)
            with pytest.raises(InvalidInput, match="feeds a text in order"):
                session.submit(tree)
        nodes.fails = 1
        assert await generate(device, sampler) == wanted
        tokens = []
        async for token in device.generate(NAME, PROMPT, max_tokens=TOKENS, sampler=sampler):
            tokens.append(token.id)
            async with device.session(NAME) as other:  # takes the only place
                await other._forward(np.ones((1, 256), "<f4"))
        assert tokens == wanted
        monkeypatch.setattr("splitup_gateway.split.server.CONNECTIONS", 0)
        assert await generate(device, sampler) == wanted, "HTTP where no WebSocket passes"


async def test_files_that_are_not_the_model_s_are_refused(
    nodes: LocalNodes, compiled: CompiledModel, tmp_path: Path
) -> None:
    digest, path = list(nodes.files.items())[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with serve_split(nodes) as url, SplitClient(url, cache=tmp_path / "c") as device:
        with pytest.raises(SplitUpError, match=f"has another digest than {digest}"):
            await generate(device)
        nodes.files[nodes.cut.manifest.model_id[2:]].write_bytes(compiled.manifest_bytes[:-1])
        with pytest.raises(SplitUpError, match="sent a manifest that is not 0x"):
            await generate(device)
        with pytest.raises(InvalidInput, match="offers no private model 'other'"):
            await device.open("other")


@pytest.mark.parametrize("noise", [None, Noise(epsilon=1e6)])
async def test_s128_a_device_takes_nothing_of_a_model_from_the_servers_words(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: Noise | None
) -> None:
    tell = SplitModel.describe
    lies = {
        **{"hidden_dim": 1, "context": 4, "chunk": 3, "max_rows": 0, "vocab": 2, "eos_ids": (7, 8)},
        **{"input": "layout", "output": "", "is_recurrent": True, "client": {}},
    }
    async with serve_split(nodes) as url:
        async with SplitClient(url, cache=tmp_path / "c") as device:
            wanted = await generate(device)
            length = await measure_length(await device.open(NAME))
        monkeypatch.setattr(SplitModel, "describe", lambda s: tell(s).model_copy(update=lies))
        async with SplitClient(url, cache=tmp_path / "c") as device:
            assert await measure_length(await device.open(NAME)) == length
            found = device.generate(NAME, PROMPT, max_tokens=TOKENS, noise=noise)
            tokens = [token.id async for token in found]
            assert len(tokens) == TOKENS and (noise is not None or tokens == wanted)


async def test_s128_a_models_id_opens_no_other_model(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, tell = f"0x{1:064x}", SplitModel.describe
    lie = {"name": wanted}
    monkeypatch.setattr(SplitModel, "describe", lambda s: tell(s).model_copy(update=lie))
    async with serve_split(nodes) as url, SplitClient(url, cache=tmp_path / "c") as device:
        with pytest.raises(InvalidInput, match=f"offers no private model '{wanted}'"):
            await device.open(wanted)
        model_id = nodes.cut.manifest.model_id
        assert (await device.open(model_id)).manifest.model_id == model_id


async def test_a_model_that_writes_blocks_is_refused_at_both_ends(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = nodes.cut.manifest.text
    assert text is not None
    blocks = text.model_copy(update={"diffusion": DiffusionInfo(block_size=4, mask_id=1)})
    manifest = nodes.cut.manifest.model_copy(update={"text": blocks})
    monkeypatch.setattr(nodes.cut, "manifest", manifest)
    with pytest.raises(InvalidInput, match="writes blocks of tokens, and devices feed one after"):
        async with serve_split(nodes):
            raise AssertionError("it is served")
    # a server that does not look offers it nevertheless
    monkeypatch.setattr("splitup_gateway.split.server.get_text_info", lambda *_: text)
    nodes.files[manifest.model_id[2:]] = tmp_path / "blocks"
    nodes.files[manifest.model_id[2:]].write_bytes(manifest.to_bytes())
    async with serve_split(nodes) as url, SplitClient(url, cache=tmp_path / "c") as device:
        with pytest.raises(InvalidModel, match="writes blocks of tokens, and devices feed one"):
            await device.open(NAME)


def test_the_path_is_the_servers() -> None:
    assert SplitServerConnection("http://localhost:8000/v1").url == "http://localhost:8000" + PATH
