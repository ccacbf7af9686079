"""Images of requests: nodes run the model's tower on those that its cache does not hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from splitup.client.images.image_prompts import PromptImages
from splitup.client.images.image_reader import ImageReader
from splitup.client.leases import LeasePool
from splitup.client.outcome import Array
from splitup.core.errors import ExecutionFailed
from splitup.graph.manifest import Manifest, Port
from splitup_gateway.charges import Charge
from splitup_gateway.errors import name_field
from splitup_gateway.generation import ATTEMPTS, GenerationOptions, Report

TOWER_STEPS: Final = 64  # of a lease of a tower, whose steps are dear; each is an image


@dataclass(frozen=True, slots=True)
class ImageTower:
    """A model that makes rows of images, and its leases. ``port`` takes the pixels."""

    manifest: Manifest
    port: Port
    pool: LeasePool
    reader: ImageReader

    async def run(
        self, files: Mapping[int, bytes], report: Report, charge: Charge
    ) -> dict[int, Array]:
        """Return each image's rows, float32 [rows, width], and fill in ``report``.

        A lease that fails is replaced once, if ``charge`` covers what it ran. Raises ApiError for a
        file that is no image, Throttled, ExecutionFailed and what opening a lease raises.
        """
        _, height, width = self.port.shape
        pixels = []
        for number, file in files.items():
            name = f"image {number + 1}"
            with name_field("image_url"):
                pixels.append(
                    await self.reader.read(
                        file, height, width, name=name, principal=charge.principal
                    )
                )
        for attempt in range(1, ATTEMPTS + 1):
            async with charge.borrow(self.pool, (), len(pixels)) as lease:
                report.image_execution_ids.append(lease.session.execution_id)
                steps = [lease.session.submit({self.port.name: each}) for each in pixels]
                try:
                    made = await asyncio.gather(*steps)
                except ExecutionFailed:
                    await asyncio.gather(*steps, return_exceptions=True)
                    cost = self.manifest.cost_micro_usdc(len(steps))
                    if attempt == ATTEMPTS or not await charge.cover(cost):
                        raise
                else:
                    (output,) = self.manifest.user_outputs
                    return dict(zip(files, (each[output.name] for each in made), strict=True))
                finally:
                    report.image_steps += len(steps)
                    cost = self.manifest.cost_micro_usdc(report.image_steps)
                    report.image_cost_micro_usdc = cost
        raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class RequestImages:
    """The images of one request, of which the tower sees each once at most."""

    tower: ImageTower
    charge: Charge
    _seen: dict[int, Array] = field(default_factory=dict)

    async def place(
        self, options: GenerationOptions, places: Sequence[range], cached: int, report: Report
    ) -> PromptImages:
        """Return a prompt's images at their ``places``; those before ``cached`` need no rows.

        Raises what ``ImageTower.run`` raises.
        """
        files = {
            number: options.images[number]
            for number, place in enumerate(places)
            if place.stop > cached and number not in self._seen
        }
        if files:
            before = report.image_cost_micro_usdc
            self._seen.update(await self.tower.run(files, report, self.charge))
            self.tower.pool.totals.cost_micro_usdc += report.image_cost_micro_usdc - before
        rows: dict[int, Array] = {}
        marks: dict[int, int] = {}
        for number, place in enumerate(places):
            marks |= dict.fromkeys(place, options.cache_key[place.start])
            if number in self._seen:
                rows |= zip(place, self._seen[number], strict=True)
        return PromptImages(rows, marks)
