"""What Prometheus reads of ``splitup serve``: leases, texts and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from splitup.net.metrics import Reading, make_histogram

if TYPE_CHECKING:
    from splitup.client.leases import LeasePool

FIRST_TOKEN: Final = make_histogram(
    "splitup_serve_first_token_seconds",
    "Time from a request for a text to its first token.",
    (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15),
)


def list_readings(pools: Mapping[str, LeasePool]) -> Iterator[Reading]:
    """Yield the figures of all models that are served, by the names they are served under."""
    for model, pool in pools.items():
        for name, text, value in (
            ("leases_idle", "Open executions that wait for a request.", len(pool.idle)),
            ("leases_lent", "Open executions that serve a request.", len(pool.lent)),
            ("requests_waiting", "Requests that wait for an execution.", len(pool.waiting)),
            ("texts_total", "Texts that ended, also by an error.", pool.totals.texts),
            ("prompt_tokens_total", "Tokens of prompts.", pool.totals.prompt_tokens),
            ("cached_tokens_total", "Tokens of prompts not fed again.", pool.totals.cached_tokens),
            ("completion_tokens_total", "Tokens of answers.", pool.totals.completion_tokens),
            ("cost_usdc_total", "Price of the steps that ran.", pool.totals.cost_micro_usdc / 1e6),
        ):
            yield Reading(f"splitup_serve_{name}", text, value, (("model", model),))
