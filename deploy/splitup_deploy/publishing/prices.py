"""A developer's own price of a model, in place of the one that its cost gives."""

from __future__ import annotations

from collections.abc import Sequence

from splitup.client.inputs import format_price
from splitup.core.errors import InvalidInput
from splitup_deploy.cutting.build import CompiledModel, change_tasks


def set_price(compiled: CompiledModel, price_nano_usdc: int) -> CompiledModel:
    """Divide a price of one step among the tasks. Raises InvalidInput for less than 1 per task."""
    tasks = compiled.manifest.tasks
    if price_nano_usdc < len(tasks):
        raise InvalidInput(
            f"each of {len(tasks)} tasks costs at least {format_price(1)}; raise "
            f"--price to {format_price(len(tasks))} or more"
        )
    prices = divide_price(price_nano_usdc, [task.price_nano_usdc for task in tasks])
    return change_tasks(compiled, lambda index, _: {"price_nano_usdc": prices[index]})


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
