"""Reads image files in a confined process: whoever sent them is a stranger, the library is native.

    {"size": [height, width], "name": …} and a file    -> float32 [3, height, width]

The way from a file to pixels is that of Hugging Face's processor of Gemma 3: turned as its EXIF
data says, RGB, resized with a bilinear filter, from -1 to 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np

from splitup.client.outcome import Array
from splitup.core import tuning
from splitup.core.errors import InvalidInput, describe
from splitup.core.extras import require
from splitup.core.places import FairLock
from splitup.sandbox.child import Child, ChildDied, ChildFailed
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.serving import Answer

_MODULE: Final = "splitup.client.images.image_reader"
_FORMATS: Final = ("JPEG", "PNG", "WEBP")
_PIXEL_BYTES: Final = 3 * 4
# of a byte: scaled to 0 … 1, then with mean and deviation 0.5, each rounded to float32
_LEVELS: Final = ((np.arange(256) / 255).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
# Where a scan of a JPEG begins, with its length and the number of its components, which must agree
_SCAN: Final = re.compile(rb"\xff\xda\0(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")


class ImageReader:
    """The parent's side. It starts a process for the first image, and after one that ended it."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._turn = FairLock()  # a file that ends the process fails alone

    async def read(
        self, data: bytes, height: int, width: int, *, name: str, principal: str = ""
    ) -> Array:
        """Return the image of a file as float32 [3, height, width].

        Raises InvalidInput for a file that is too large, has too many pixels, or is no image;
        ``name`` says in errors which. The process reads one file after the other, and its turns go
        round by ``principal``.
        """
        if len(data) > tuning.MAX_IMAGE_BYTES:
            most = tuning.MAX_IMAGE_BYTES >> 20
            raise InvalidInput(f"{name} has more than {most} MiB; give a smaller one")
        size = _PIXEL_BYTES * height * width
        async with self._turn.hold(principal):
            if self._child is None or not self._child.is_running:
                require("PIL")
                self._child = Child(_MODULE, [str(tuning.IMAGE_READER_MEMORY_BYTES)])
            try:
                _, found = await self._child.ask_apart(
                    {"size": [height, width], "name": name},
                    [data],
                    timeout_s=tuning.IMAGE_READ_S,
                    max_bytes=size,
                )
            except ChildFailed as error:
                raise InvalidInput(str(error)) from None
            except ChildDied as error:
                raise InvalidInput(f"{name} ended the process that read it: {error}") from None
        if len(found) != 1 or len(found[0]) != size:
            raise InvalidInput(f"{name} cannot be read: its process gave no pixels")
        return np.frombuffer(found[0], np.float32).reshape(3, height, width)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()


def read_pixels(data: bytes | memoryview, height: int, width: int, *, name: str) -> Array:
    """Return the image of a file as float32 [3, height, width]. Blocks.

    Raises InvalidInput for a file that has too many pixels or is no image.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # of the extra [serve]

    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as opened:
            if (pixels := opened.width * opened.height) > tuning.MAX_IMAGE_PIXELS:
                raise InvalidInput(
                    f"{name} has {pixels} pixels; give one of at most {tuning.MAX_IMAGE_PIXELS}"
                )
            scans = sum(1 for _ in _SCAN.finditer(data))
            if scans * pixels > (most := tuning.MAX_IMAGE_SCANS * tuning.MAX_IMAGE_PIXELS):
                raise InvalidInput(
                    f"{name} draws its {pixels} pixels in {scans} scans; give one of at most "
                    f"{most // pixels}"
                )
            plain = ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidInput:
        raise
    except UnidentifiedImageError:
        raise InvalidInput(f"{name} is no {', '.join(_FORMATS)} file") from None
    except Exception as error:  # the library raises many kinds for a damaged file
        raise InvalidInput(
            f"{name} cannot be read: {describe(error):.80}; give a whole {', '.join(_FORMATS)} file"
        ) from None
    resized = np.asarray(plain.resize((width, height), Image.Resampling.BILINEAR))
    return np.ascontiguousarray(_LEVELS[resized.transpose(2, 0, 1)])


def _answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
    pixels = read_pixels(buffers[0], *question["size"], name=question["name"])
    return {}, [pixels.data.cast("B")]


def main() -> None:
    from PIL import Image

    Image.init()  # the formats' own modules
    serve_confined(_answer, memory_bytes=int(sys.argv[1]))


if __name__ == "__main__":
    main()
