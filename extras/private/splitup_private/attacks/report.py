"""What attacks on private splits found, as a table and as a file for ``register --privacy``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich.bar import Bar
from rich.table import Table

from splitup.core.errors import InvalidInput
from splitup.graph.manifest import PrivacyMeasure
from splitup_private.attacks.measure import Split


def parse_blocks(text: str) -> list[int]:
    """Return the numbers of a list such as "0,1,2"; raises InvalidInput."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise InvalidInput(f"--private is a list of numbers of blocks such as 0,1,2, not {text!r}")
    return sorted({int(part) for part in text.split(",")})


def make_file(splits: Sequence[Split]) -> dict[str, Any]:
    """Return the fields of a ``PrivacyFile``."""
    return {"splits": {split.key: split.found.model_dump(mode="json") for split in splits}}


def render_splits(splits: Sequence[Split]) -> Table:
    """Return a table with a column for each split: the share of tokens that attacks recovered."""
    table = Table(title="Tokens that attacks recovered", caption=_CAPTION, caption_justify="left")
    table.add_column("blocks that the user keeps at each end")
    for split in splits:
        table.add_column(str(split.blocks), justify="right")

    def add_row(name: str, values: Iterable[str]) -> None:
        table.add_row(name, *values)

    def add_shares(name: str, get: Callable[[PrivacyMeasure], int]) -> None:
        add_row(name, (f"{get(split.found) / 100:.1f} %" for split in splits))

    add_row("memory on the user's device", (f"{s.client_bytes / 10**6:.1f} MB" for s in splits))
    add_shares("sent, with the model's weights", lambda found: found.with_weights_bps)
    for place, (pairs, _) in enumerate(splits[0].found.pairs):
        add_shares(f"sent, after {pairs:,} pairs", lambda found, n=place: found.pairs[n][1])  # type: ignore[misc]
    pairs = splits[0].found.pairs[-1][0]
    add_shares(f"sent back, after {pairs:,} pairs", lambda found: found.returned_bps)
    add_shares("sent back, next token, with the weights", lambda found: found.next_token_bps)
    shares = (f"{split.by_length_bps / 100:.1f} %" for split in splits)
    add_row(f"which of {splits[0].known:,} known texts, by its length", shares)
    return table


def render_curves(splits: Sequence[Split]) -> Table:
    """Return a picture: what attacks without the weights recover, a bar per split and pairs."""
    table = Table.grid(padding=(0, 1))
    table.title = "Recovered without the weights, by blocks kept (K) and pairs learnt from"
    for align in ("right", "right", "left", "right"):
        table.add_column(justify=align)
    for split in splits:
        for place, (pairs, share) in enumerate(split.found.pairs):
            name = f"K = {split.blocks}" if place == 0 else ""
            bar = Bar(_BPS, 0, share, width=_BAR_CELLS)
            table.add_row(name, f"{pairs:,}", bar, f"{share / 100:.0f} %")
    return table


_BPS: Final = 10_000
_BAR_CELLS: Final = 50
_CAPTION: Final = (
    "After pairs: without the weights, having learnt from so many pairs of a token and its "
    "activations. Next token: how often the likeliest one is that of the text. By its length: the "
    "number of tokens is always seen, and so is the time of each."
)
