"""Images in prompts: their places among the tokens, and the rows that stand there.

The way from a text to tokens is that of Hugging Face's processor of Gemma 3.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from splitup.client.outcome import Array
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core import tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.decode.step import StepInput
from splitup.graph.manifest import ImageInfo, Manifest, Port

ImageFile = bytes | str | Path  # the bytes of a file, or its path


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


def load_image(image: ImageFile) -> tuple[str, bytes]:
    """Return what errors call an image, and the bytes of its file. Blocks.

    Raises InvalidInput for a file that cannot be read.
    """
    if isinstance(image, bytes):
        return "an image", image
    name = f"image '{image}'"
    try:
        with Path(image).open("rb") as file:
            return name, file.read(tuning.MAX_IMAGE_BYTES + 1)
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


def mark_images(
    prompt: Sequence[int], places: Sequence[range], files: Sequence[bytes]
) -> tuple[int, ...]:
    """Return a prompt's tokens with a negative number for those of each image, told by its file.

    Two prompts whose marked tokens are equal fill a cache with the same rows.
    """
    marked = list(prompt)
    for place, file in zip(places, files, strict=True):
        mark = -1 - int.from_bytes(hashlib.sha256(file).digest())
        marked[place.start : place.stop] = [mark] * len(place)
    return tuple(marked)


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, by positions.

    ``rows`` are float32 [width] each, and may lack those that are cached. ``marks`` are what
    ``mark_images`` has in their places, if the cache serves other prompts.
    """

    rows: Mapping[int, Array]
    marks: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def place(cls, places: Sequence[range], rows: Array) -> Self:
        """Place the rows of all images [rows, width], one image after the other."""
        return cls(dict(zip(itertools.chain(*places), rows, strict=True)))

    def mark(self, step: StepInput) -> StepInput:
        """Return a step with the marks of its images instead of their tokens."""
        rows = zip(step.positions, step.tokens, strict=True)
        return replace(step, tokens=tuple(self.marks.get(place, token) for place, token in rows))


def place_rows(step: StepInput, images: PromptImages | None, info: ImageInfo) -> Array:
    """Return a step's input "images", float32 [T, width]: zeros for tokens that are no image."""
    placed = np.zeros((step.rows, info.width), np.float32)
    if images is not None:
        for number, position in enumerate(step.positions):
            if (row := images.rows.get(position)) is not None:
                placed[number] = row
    return placed
