"""A developer's own price of a model, in place of the one that its cost gives."""

from __future__ import annotations

from collections.abc import Sequence

from splitup.client.inputs import format_usdc, parse_usdc
from splitup.core.errors import InvalidInput
from splitup_deploy.cutting.build import CompiledModel, change_tasks


def parse_price(text: str) -> int:
    """Return an amount of USDC in micro-USDC. Raises InvalidInput."""
    return parse_usdc(text, name="--price-per-step")


def set_price_per_step(compiled: CompiledModel, price_micro_usdc: int) -> CompiledModel:
    """Divide a price of one step among the tasks. Raises InvalidInput for less than 1 per task."""
    tasks = compiled.manifest.tasks
    if price_micro_usdc < len(tasks):
        raise InvalidInput(
            f"each of {len(tasks)} tasks costs at least {format_usdc(1)} per step; raise "
            f"--price-per-step to {format_usdc(len(tasks))} or more"
        )
    prices = divide_price(price_micro_usdc, [task.price_micro_usdc for task in tasks])
    return change_tasks(compiled, lambda index, _: {"price_micro_usdc": prices[index]})


def divide_price(total: int, weights: Sequence[int]) -> list[int]:
    """Return whole shares of at least 1 that add up to ``total``, in proportion to ``weights``.

    Every share gets 1 first, then its part of the rest, rounded down; what rounding leaves goes to
    the largest remainders, the earlier first. ``total`` is at least ``len(weights)``.
    """
    rest, whole = total - len(weights), sum(weights)
    shares = [1 + rest * weight // whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: -(rest * weights[i] % whole))
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares
