"""What ``splitup serve`` says at its start."""

from __future__ import annotations

import asyncio
from typing import cast

from splitup_gateway.commands.serve import list_waits
from typer.testing import CliRunner

from splitup.cli.verbs import app
from splitup.client.network import Network
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


def test_s91_models_of_strangers_are_not_served_unnamed() -> None:
    found = CliRunner().invoke(app, ["serve"])
    assert found.exit_code == 2 and "Missing argument 'MODEL...'" in found.output
