"""What ``splitup serve`` says at its start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from splitup_gateway.commands.serve import add_models, list_waits
from splitup_gateway.http_server import ApiServer
from typer.testing import CliRunner

from splitup.cli.verbs import app
from splitup.client.network import Network
from splitup.core.errors import InvalidInput
from splitup.messages.snapshots import ModelHolders


class Looking:
    """A connection that has looked for the holders of two models."""

    async def look(self, name: str) -> ModelHolders | None:
        if name == "held":
            return None
        return ModelHolders(
            model_id="0x" + "ab" * 32, tasks=12, held=5, reported=7, loading=2, able=1, live=6
        )


def test_a_model_that_nodes_still_load_is_named() -> None:
    said = asyncio.run(list_waits(cast("Network", Looking()), ["held", "fresh"]))
    assert said == ["requests for fresh wait until nodes hold it: loading 7 of 12 tasks"]


class Serving:
    """A server that cannot read the tokenizer of one model."""

    async def add_model(self, name: str, draft: str | None = None) -> None:
        if name == "hostile":
            raise InvalidInput("its tokenizer cannot be read")


def test_s91_a_strangers_model_is_left_out_and_ends_no_server() -> None:
    drafts: dict[str, str | None] = {"good": None, "hostile": None}
    api = cast("ApiServer", Serving())
    said = asyncio.run(add_models(api, drafts, are_named=False))
    assert said == ["not served: hostile: its tokenizer cannot be read"]
    assert list(drafts) == ["good"]


def test_a_model_that_was_named_ends_a_server_that_cannot_serve_it() -> None:
    drafts: dict[str, str | None] = {"good": None, "hostile": None}
    with pytest.raises(InvalidInput, match="its tokenizer cannot be read"):
        asyncio.run(add_models(cast("ApiServer", Serving()), drafts, are_named=True))


def test_a_server_for_everybody_needs_a_key_and_a_certificate(tmp_path: Path) -> None:
    flags = ["--host", "0.0.0.0", "--keys", f"sqlite:///{tmp_path / 'keys.sqlite'}"]
    done = CliRunner().invoke(app, ["serve", "model", *flags])
    assert done.exit_code == 2 and "--host 0.0.0.0 is not a loopback address" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["revoke"], "name the key: splitup keys revoke NAME"), (["list", "x"], "list takes no name")],
)
def test_keys_say_where_a_name_belongs(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["keys", *arguments])
    assert done.exit_code == 2 and said in done.output
