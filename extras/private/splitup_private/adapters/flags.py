"""The flags of ``splitup generate`` for an adapter under encryption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.command import AdapterFlags
from splitup.core.errors import InvalidInput

if TYPE_CHECKING:
    from splitup_private.adapters.client import AdapterOptions


@dataclass(frozen=True, slots=True)
class EncryptedAdapterFlags(AdapterFlags):
    """An adapter that is applied to encrypted hidden states."""

    adapter_host: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Apply an adapter under encryption; for models registered with --private 0.",
        ),
    ] = None
    expert: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its name there or its SHA-256; by default the prompt's words choose.",
        ),
    ] = None
    check_host: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Another host of the adapter, which has to give the same answers."
        ),
    ] = None

    adapter_signer: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The signing key that has to have signed what the host offers."
        ),
    ] = None

    def read(self) -> AdapterOptions | None:
        """Return the options that were typed, None without any; raise InvalidInput."""
        from splitup_private.adapters.client import AdapterOptions

        if self.adapter_host is None:
            if (self.expert, self.check_host, self.adapter_signer) == (None, None, None):
                return None
            raise InvalidInput("an adapter needs --adapter-host URL")
        return AdapterOptions(
            self.adapter_host,
            self.expert or "",
            self.check_host or "",
            signer=self.adapter_signer or "",
        )
