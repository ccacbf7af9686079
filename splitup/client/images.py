"""Images in prompts: the pixels that a model's tower takes, and their places among the tokens.

The way from a file to pixels, and from a text to tokens, is that of Hugging Face's processor of
Gemma 3: turned as its EXIF data says, RGB, resized with a bilinear filter, from -1 to 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageOps

from splitup.client.outcome import Array
from splitup.client.tokenizer import ModelTokenizer
from splitup.core import tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.decode.step import StepInput
from splitup.graph.manifest import ImageInfo, Manifest, Port

ImageFile = bytes | str | Path  # the bytes of a file, or its path
_FORMATS: Final = ("JPEG", "PNG", "WEBP")
# of a byte: scaled to 0 … 1, then with mean and deviation 0.5, each rounded to float32
_LEVELS: Final = ((np.arange(256) / 255).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)


def find_pixels(tower: Manifest, info: ImageInfo) -> Port:
    """Return a tower's input, float32 [3, height, width].

    Raises InvalidModel for a model that is no tower for such images, or for too large ones.
    """
    found, made = tower.user_inputs, tower.user_outputs
    if [port.shape for port in made] == [(info.rows, info.width)] and len(found) == 1:
        (port,), shape = found, found[0].shape
        is_image = port.dtype == "float32" and len(shape) == 3 and shape[0] == 3 and not port.rows
        if is_image and shape[1] * shape[2] <= tuning.MAX_TOWER_PIXELS:
            return port
    raise InvalidModel(f"model {tower.model_id} is no tower for the text model's images")


def read_pixels(image: ImageFile, height: int, width: int) -> Array:
    """Return an image as float32 [3, height, width]. Blocks.

    Raises InvalidInput for a file that is too large, has too many pixels, or is no image.
    """
    name = "an image" if isinstance(image, bytes) else f"image '{image}'"
    data = image if isinstance(image, bytes) else _read_file(Path(image), name)
    if len(data) > tuning.MAX_IMAGE_BYTES:
        raise InvalidInput(
            f"{name} has more than {tuning.MAX_IMAGE_BYTES >> 20} MiB; give a smaller one"
        )
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as opened:
            if (pixels := opened.width * opened.height) > tuning.MAX_IMAGE_PIXELS:
                raise InvalidInput(
                    f"{name} has {pixels} pixels; give one of at most {tuning.MAX_IMAGE_PIXELS}"
                )
            plain = ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidInput:
        raise
    except Exception as error:  # the library raises many kinds for a damaged file
        raise InvalidInput(
            f"{name} cannot be read: {error!s:.80}; give a whole {', '.join(_FORMATS)} file"
        ) from None
    resized = np.asarray(plain.resize((width, height), Image.Resampling.BILINEAR))
    return np.ascontiguousarray(_LEVELS[resized.transpose(2, 0, 1)])


def _read_file(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(tuning.MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror}") from None


def expand_prompt(text: str, tokenizer: ModelTokenizer, info: ImageInfo, count: int) -> str:
    """Return a text in which every place of an image has the image's tokens. Blocks.

    A place is the text of the token ``begin``; images come first in a text without places. Raises
    InvalidInput unless there are ``count`` places, InvalidModel for a tokenizer without the tokens.
    """
    begin, token, end = (
        tokenizer.decode([each], skip_special_tokens=False)
        for each in (info.begin, info.token, info.end)
    )
    if not (begin and token and end):
        raise InvalidModel("the model's tokenizer does not know the tokens of images")
    if begin not in text:
        text = begin * count + text
    if (places := text.count(begin)) != count:
        raise InvalidInput(f"the prompt has {places} places {begin}, and there are {count} images")
    return text.replace(begin, f"\n\n{begin}{token * info.rows}{end}\n\n")


def find_images(prompt: Sequence[int], info: ImageInfo | None, count: int) -> tuple[range, ...]:
    """Return the positions of each image among a prompt's tokens.

    Raises InvalidInput unless ``count`` images have their places.
    """
    if info is None:
        if count:
            raise InvalidInput("the model takes no images; it was registered without --images")
        return ()
    found, place = [], 0
    for is_image, run in itertools.groupby(prompt, key=info.token.__eq__):
        start, place = place, place + len(list(run))
        if is_image:
            found.append(range(start, place))
    if len(found) != count or any(len(image) != info.rows for image in found):
        raise InvalidInput(
            f"the prompt's tokens have places for {sum(map(len, found))} rows of images, and "
            f"{count} images of {info.rows} rows were given"
        )
    return tuple(found)


def place_rows(
    step: StepInput, images: Sequence[range], rows: Array | None, info: ImageInfo
) -> Array:
    """Return a step's input "images", float32 [T, width]: zeros for tokens that are no image.

    ``rows`` are those of all ``images``, one after the other.
    """
    placed = np.zeros((step.rows, info.width), np.float32)
    if rows is not None:
        order = {position: row for row, position in enumerate(itertools.chain(*images))}
        for number, position in enumerate(step.positions):
            if position in order:
                placed[number] = rows[order[position]]
    return placed
